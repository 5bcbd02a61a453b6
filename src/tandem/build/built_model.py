"""Build or load the model of a run from its spec: weights, tokenizer, precision and adapters, on its device."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.build import sight
from tandem.errors import SpecError
from tandem.ops.byte_sizes import Shares, shares_masked, shares_never, shares_recurrent, shares_unmasked, sums_of_ranks
from tandem.spec.model import ModelSpec, PathModel, PresetModel
from tandem.spec.parallel import ONE_PROCESS, ParallelSpec, settled
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.spec.preference import RewardModelSpec
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec

if TYPE_CHECKING:
    from tandem.model.policy import CausalPolicy
    from tandem.optim.master_weights import Master
    from tandem.runs.run import Run
    from tandem.text.renderer import Renderer
    from tandem.train.crew import Crew

_SAID = re.compile(r"LOAD REPORT|The following generation flags are not valid")
LACKED = re.compile(r"because `([^`]+)` is not installed")

# Imports stand inside the functions, so that a run loads only what its spec needs, and wrong specs fail before torch.


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A policy with its renderer, on its device."""

    policy: CausalPolicy
    renderer: Renderer
    device: Any
    context: int
    """Most tokens of a sequence, prompt and completion together."""
    master: Master
    """The master weights; all stages of a run share them, as they share the model."""
    crew: Crew | None = None
    """The ranks that hold the model together; None: this process has all of it."""
    num_shares: int = 1
    """Micro-batches come in multiples of this."""
    sums: str = "round"
    """What became of parallel.sums."""

    @property
    def shares(self) -> Shares:
        """Return the rule for when the samples of a group share one copy of their prompt."""
        if self.policy.forward.why_alone:
            return shares_never
        hidden: int = self.policy.module.config.get_text_config().hidden_size
        shares = shares_unmasked if self.policy.forward.shares_freely else shares_masked(hidden)
        return shares_recurrent(shares) if self.policy.forward.is_recurrent else shares

    def warn(self, run: Run) -> None:
        """Print what was mended in the special tokens, and which tensors were left out; log.txt has the latter."""
        for text in self.renderer.mended:
            run.warn(text)
        if text := getattr(self.policy.module, "left_out", ""):
            run.view.say(f"   {text}")

    @property
    def num_ids(self) -> int:
        return len(self.renderer.tokenizer)


def settle_torch(spec: RunSpec) -> Any:
    """Seed torch and set determinism for the whole process; return the spec's device."""
    import torch

    torch.manual_seed(spec.seed)
    device = pick_device(spec.device)
    if wanted := not why_not_deterministic(spec, device):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first product
    torch.use_deterministic_algorithms(wanted)
    # Filling fresh memory with NaN finds bugs, not differences, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return device


def why_not_deterministic(spec: RunSpec, device: Any) -> str:
    """Return why torch's deterministic kernels are not asked for; empty if they are."""
    of_gpu = "on a GPU only SFT and preference training give equal bytes"
    why_not = of_gpu if isinstance(spec, RlSpec) and device.type != "cpu" else ""
    return why_not if spec.deterministic else "deterministic = false"


def import_model_code(spec: RunSpec) -> None:
    """Import what every model needs. Ranks do so before they meet: from a slow disk it takes minutes, and a rank that
    makes no progress in an order for `parallel.deadline_s` is taken for lost."""
    import transformers.generation.utils  # noqa: F401

    if spec.model.lora is not None:
        from tandem.model.lora import quiet_bitsandbytes

        quiet_bitsandbytes()
        import peft  # noqa: F401


def pick_device(wanted: Literal["auto", "cpu", "cuda"]) -> Any:
    """Return the torch device for a spec's `device`."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise SpecError("device = 'cuda': torch finds no GPU; set device = 'cpu', or install a CUDA build of torch")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def quiet_transformers() -> None:
    """Hide what transformers prints and Tandem says itself, or that has no effect here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the live view is the one that draws
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is neither of tensors that are left out or missing, nor of a generation_config.json, with
    which Tandem does not sample, nor, without a GPU, of a GPU's package that recurrent layers lack."""
    import torch

    text = record.getMessage()
    return not (_SAID.search(text) or (LACKED.search(text) and not torch.cuda.is_available()))


def run_model(spec: RunSpec, crew: Crew | None, images: Path | None = None) -> BuiltModel:
    """Build the model of a run: in this process, or on all ranks of the crew. `images`: where the run keeps its images;
    None: a model that sees gets text only."""
    device = settle_torch(spec)
    max_context = getattr(getattr(spec, "engine", None), "max_context", 0)  # SFT has no engine
    if crew is not None:
        return crew.order("model", max_context=max_context)[0]
    scores = isinstance(spec, PreferenceSpec) and isinstance(spec.algorithm, RewardModelSpec)
    parallel = settled(spec.parallel, deterministic=spec.deterministic)
    built = model(
        spec.model, spec.precision, spec.seed, device, max_context, parallel=parallel, scores=scores, images=images,
        trains=True,
    )  # fmt: skip
    sight.refuse_unsupported(spec, built.policy.vision is not None)
    return built


def model(
    spec: ModelSpec,
    precision: PrecisionSpec,
    seed: int,
    device: Any,
    max_context: int = 0,
    *,
    crew: Crew | None = None,
    parallel: ParallelSpec = ONE_PROCESS,
    scores: bool = False,
    in_engine: bool = False,
    images: Path | None = None,
    trains: bool = False,
) -> BuiltModel:
    """Create or load the model, apply warm start, precision and adapters, and move it to `device`. With a crew, every
    rank calls this, and keeps its rows. `scores`: make it a reward model. `in_engine`: ranks will train in the memory
    of an engine's workers. `images`: a directory, for a model that sees. `trains`: its gradient is checked."""
    from tandem.model.cast_precision import narrow
    from tandem.model.policy import CausalPolicy
    from tandem.model.presets import make_model
    from tandem.model.quantized_base import quantized_parts
    from tandem.model.reward_head import RewardPolicy, with_reward_head
    from tandem.model.warm_start import begin_with, is_adapter_start
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import byte_tokenizer, load_tokenizer

    quiet_transformers()
    adapter = spec.warm_start if spec.warm_start and spec.lora and is_adapter_start(spec.warm_start) else None
    warm_start = spec.warm_start if adapter is None else None
    module: Any = None  # where ranks read rows of the files themselves
    if isinstance(spec, PresetModel):
        tokenizer = byte_tokenizer()
        module = make_model(spec.preset, tokenizer, seed, spec.kernel)
    else:
        tokenizer = load_tokenizer(spec.path, spec.revision)
        if crew is None or warm_start is not None:
            module = existing_model(spec, precision, device)
    if warm_start is not None:
        module = begin_with(module, warm_start)  # before narrow, so that no bit of 32 is lost
    way_out = "set parallel.ranks = 1" if crew else "choose another algorithm.kind" if scores else ""
    source, processor = sight.of_model(spec, module, images, way_out)
    renderer = Renderer(tokenizer, thinking=spec.thinking, images=source)
    kind = CausalPolicy
    if scores:
        kind, module = RewardPolicy, with_reward_head(module, tokenizer, renderer.end_id)
    master_weights = master(precision, seed, adapters=spec.lora is not None)
    options: dict[str, Any] = {
        "lora": spec.lora, "adapter": adapter, "activations": spec.activations, "packed": spec.attention == "packed",
        "compiled": spec.compile, "end_ids": renderer.end_ids, "never_ends": renderer.never_ends,
        "images": source, "processor": processor,
    }  # fmt: skip
    policy: Any
    if crew is not None:
        from tandem.build.crew import policy_by_rows

        policy = policy_by_rows(
            spec, module, tokenizer, precision, master_weights, crew, parallel, options, in_engine=in_engine
        )
        module = policy.module
    else:
        if isinstance(precision, Bfloat16Precision) and not quantized_parts(module):
            narrow(module, device, master_weights.adopt if master_weights.keeps_bits else None)
        module = module if quantized_parts(module) else module.to(device)  # quantised models were loaded onto it
        policy = kind(module, tokenizer, **options)
    if trains:
        (policy if crew is None else policy.inner).check_gradient()
    model_context = module.config.get_text_config().max_position_embeddings
    context = min(max_context or model_context, model_context)
    sums = sums_of_ranks(parallel.sums, 0, 0) if crew is None else crew.sums
    return BuiltModel(policy, renderer, device, context, master_weights, crew, parallel.num_shares, sums)


def tokenizer_from_scratch(idle: int) -> Any:
    """Return the presets' byte-level tokenizer, with `idle` unused ids added."""
    from tandem.text.tokenizer import byte_tokenizer

    return byte_tokenizer(idle)


def existing_model(spec: PathModel, precision: PrecisionSpec, device: Any) -> Any:
    """Load the model of `model.path`, quantised if `model.lora.base` asks for it."""
    import torch

    from tandem.model.load_checkpoint import load_model
    from tandem.model.quantized_base import load_quantized

    if spec.lora is None or spec.lora.base == "exact":
        return load_model(spec.path, spec.revision, spec.kernel)
    dtype = torch.bfloat16 if isinstance(precision, Bfloat16Precision) else torch.float32
    return load_quantized(spec.path, spec.revision, spec.kernel, base=spec.lora.base, dtype=dtype, device=device)


def master(precision: PrecisionSpec, seed: int, *, adapters: bool) -> Master:
    """Build the store of the bits that 16-bit weights lack. `adapters`: only adapters are trained."""
    from tandem.optim import master_weights as masters

    if adapters or isinstance(precision, Float32Precision):
        return masters.Float32()  # adapters are small, so they stay in float32 even if the base has 16 bits
    if precision.master == "split":
        return masters.SplitMaster()
    if precision.master == "fp32":
        return masters.Fp32Copy()
    return masters.Stochastic(seed) if precision.master == "stochastic" else masters.InPlace()


def why_not_ranks(model: BuiltModel, path: str) -> str:
    """Return why several ranks cannot read this model's files by rows; empty if they can."""
    from tandem.model.load_rows import refuse_converted

    try:
        refuse_converted(model.policy.module, path, "model.path")
    except SpecError as error:
        return str(error)
    return ""


def embedded_refuses(path: Path) -> bool:
    """Return whether the embedded engine refuses the model in a directory, if there is one."""
    if not (path / "config.json").is_file():
        return False
    from transformers import AutoConfig

    from tandem.ops.attention_masks import check_attention

    try:
        check_attention(AutoConfig.from_pretrained(path))
    except SpecError:
        return True
    return False
