"""Set what the loss compares the policy with: the weights that training began with, or a teacher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.build.built_model import BuiltModel
from tandem.errors import SpecError
from tandem.spec.algorithm import AlgorithmSpec, DistillSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from tandem.rollout.teacher import ServedTeacher


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


async def served_teacher(spec: AlgorithmSpec, model: BuiltModel) -> ServedTeacher | None:
    """Return the teacher that a server has, once it has shown that it can score the policy's tokens; None if the
    algorithm has no such teacher."""
    from tandem.rollout.teacher import ServedTeacher

    if not isinstance(spec, DistillSpec) or not spec.is_served:
        return None
    teacher = ServedTeacher(spec.teacher, spec.teacher_model, _key(spec), timeout_s=spec.teacher_timeout_s)
    renderer = model.renderer
    opening = renderer.decode(renderer.prompt([{"role": "user", "content": "2 + 2?"}]), skip_special=False)
    await teacher.begin(renderer.encode, opening)
    return teacher


def _key(spec: DistillSpec) -> str:
    try:
        if spec.teacher_key_env:
            return os.environ[spec.teacher_key_env].strip()
        return Path(spec.teacher_key_file).read_text(encoding="utf-8").strip() if spec.teacher_key_file else ""
    except (KeyError, OSError, UnicodeDecodeError):
        name = "teacher_key_env" if spec.teacher_key_env else "teacher_key_file"
        what = "environment variable" if spec.teacher_key_env else "file that can be read"
        raise SpecError(f"algorithm.{name} = '{getattr(spec, name)}': there is no such {what}; correct it") from None
