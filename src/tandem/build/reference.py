"""Set what the loss compares the policy with: the weights that training began with, or a teacher."""

from __future__ import annotations

from tandem.build.training import BuiltModel
from tandem.errors import SpecError
from tandem.spec.algorithm import AlgorithmSpec, DistillSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.preference import PreferenceAlgorithm


def set_reference(
    spec: AlgorithmSpec | PreferenceAlgorithm | None, model: BuiltModel, precision: PrecisionSpec
) -> None:
    """Set the policy's reference model: a frozen copy of its current weights, or the teacher of distillation."""
    from tandem.model.cast_precision import narrow
    from tandem.model.load_checkpoint import load_model
    from tandem.ops import packed_attention
    from tandem.text.tokenizer import load_tokenizer

    if not isinstance(spec, DistillSpec):
        model.policy.keep_reference()
        return
    vocabulary = load_tokenizer(spec.teacher, spec.teacher_revision, "algorithm.teacher").get_vocab()
    if different := len(vocabulary.items() ^ model.renderer.tokenizer.get_vocab().items()):
        raise SpecError(
            f"algorithm.teacher = '{spec.teacher}': its vocabulary differs from the policy's in {different} entries, "
            "so their logprobs cannot be compared; choose a teacher with the policy's tokenizer"
        )
    policy_attention = model.policy.module.config._attn_implementation
    attention = "sdpa" if policy_attention == packed_attention.NAME else policy_attention
    teacher = load_model(spec.teacher, spec.teacher_revision, attention, "algorithm.teacher")
    if isinstance(precision, Bfloat16Precision):
        narrow(teacher, model.device, None)
    model.policy.follow(teacher.to(model.device))
