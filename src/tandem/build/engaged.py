"""Which requested optimisations are engaged, and if not, why."""

from __future__ import annotations

from typing import Any

from tandem.build.built_model import BuiltModel, why_not_deterministic
from tandem.ops.option_report import AUTO
from tandem.spec.algorithm import DistillSpec
from tandem.spec.environment import only_scores
from tandem.spec.optim import AdamWOffloadSpec
from tandem.spec.precision import Bfloat16Precision
from tandem.spec.run import RlSpec, RunSpec


def options(spec: RunSpec, model: BuiltModel) -> list[tuple[str, Any, bool, str]]:
    """Return each optimisation: its name, the requested value, whether it is engaged, and if not, why. The value is
    AUTO where no field of the spec asks for it, or the user left that field out."""
    from tandem.model.quantized_base import quantized_parts, share
    from tandem.ops import digest, packed_attention

    module = model.policy.module
    found: list[tuple[str, Any, bool, str]] = []
    forward, chosen = model.policy.forward, module.config._attn_implementation
    if chosen == packed_attention.NAME:  # an engine may have engaged it for its own steps
        chosen = "sdpa"
    if spec.model.attention == "packed":
        why_not = forward.why_masked
    else:
        why_not = "" if chosen == spec.model.attention else f"transformers chose '{chosen}' for {type(module).__name__}"
    found.append(("model.attention", spec.asked("model.attention", AUTO), not why_not, why_not))
    if forward.why_alone:
        found.append(("packing of sequences", AUTO, False, forward.why_alone))
    if forward.is_recurrent:
        found.append(("packing of sequences", "recurrent layers: a row for each sequence", True, ""))
    if forward.why_in_torch:
        why_not = f"torch computes them, more slowly, for the kernels compute no gradient here: {forward.why_in_torch}"
        found.append(("kernels of recurrent layers", AUTO, False, why_not))
    if model.policy.vision is not None:
        found.append(("images", "the vision tower is frozen", True, ""))
    if model.crew is not None:
        found.append((f"parallel.gather = '{model.crew.gathers_for}'", spec.asked("parallel.gather", AUTO), True, ""))
    if model.num_shares > 1:
        found.append((f"parallel.sums = '{model.sums}'", spec.asked("parallel.sums", AUTO), True, ""))
    if spec.model.compile:
        found.append(
            ("model.compile", spec.asked("model.compile", AUTO), not forward.why_not_compiled, forward.why_not_compiled)
        )
    if spec.model.activations != "keep":
        why_not = model.policy.activations.why_not
        found.append(("model.activations", spec.asked("model.activations", AUTO), not why_not, why_not))
    if spec.model.warm_start is not None:
        found.append(("model.warm_start", spec.model.warm_start, True, ""))  # a partial match has already been refused
    if spec.model.lora and spec.model.lora.base != "exact":
        few = f"{spec.model.lora.base}: {len(quantized_parts(module))} layers, {share(module):.0%} of the weights"
        found.append(("model.lora.base", few, True, ""))
    if isinstance(spec.precision, Bfloat16Precision) and spec.model.lora is None:
        found.append(("precision.master", spec.asked("precision.master", AUTO), True, ""))
    for name, stage in (("warmup", getattr(spec, "warmup", None)), ("train", spec.train)):
        if stage is not None and isinstance(stage.optimizer, AdamWOffloadSpec):
            from tandem.optim import adamw_offload

            why_not = adamw_offload.why_not(model.device)
            found.append((f"{name}.optimizer.kind", "adamw_offload", not why_not, why_not))
        if stage is not None and stage.gradient_release:
            costs = "a failed step has already changed some weights; clipping uses the norm of earlier steps"
            found.append((f"{name}.gradient_release", True, True, costs))
    if spec.algorithm is None or spec.algorithm.kind != "reward_model":
        why_not = model.policy.why_not_fused(getattr(spec.train, "top_p", 1.0))
        found.append(("fused lm-head", AUTO, not why_not, why_not))
    if digests := digest.fused(model.device):
        found.append(("fused digests", AUTO, digests["engaged"], digests["why_not"]))
    if spec.deterministic:
        why_not = why_not_deterministic(spec, model.device)
        if isinstance(spec, RlSpec) and spec.engine.kind != "hf":
            why_not = "the engine runs in its own process, so the timing of its batches varies"
        elif isinstance(spec, RlSpec) and isinstance(spec.algorithm, DistillSpec) and spec.algorithm.is_served:
            why_not = "the teacher answers from another process, which batches in an order of its own"
        elif isinstance(spec, RlSpec) and _order_varies(spec):
            why_not = "episodes in worker processes end in varying order, and equal groups are replaced in that order"
        found.append(("deterministic", spec.asked("deterministic", AUTO), not why_not, why_not))
    return found


def _order_varies(spec: RlSpec) -> bool:
    """Return whether what is sampled together, or next, depends on how fast workers are."""
    its = spec.environment
    one_batch = spec.train.max_lag == 0 and spec.train.replace_equal_groups == 0
    return its is not None and its.workers > 0 and not (one_batch and only_scores(its.name, its.params))
