"""Build the judge model that an environment asks: the run's engine, a server, or a trained reward model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.errors import EpisodeFailed, SpecError
from tandem.protocols import Engine
from tandem.spec.environment import EngineJudgeSpec, HttpJudgeSpec, JudgeSpec, NoJudge, RewardModelJudgeSpec
from tandem.types import Message

if TYPE_CHECKING:
    from tandem.rollout.judge import Judge
    from tandem.text.renderer import Renderer


def judge_model(spec: JudgeSpec, engine: Engine, renderer: Renderer, max_context: int) -> Judge | None:
    """Build the judge model that the environment asks; None if it asks none."""
    from tandem.rollout.judge import EngineJudge, HttpJudge, RewardModelJudge

    match spec:
        case NoJudge():
            return None
        case EngineJudgeSpec():
            return EngineJudge(engine, renderer, max_context=max_context, timeout_s=spec.timeout_s)
        case HttpJudgeSpec():
            key = os.environ.get(spec.key_env, "") if spec.key_env else ""
            if spec.key_env and not key:
                raise SpecError(f"environment.judge.key_env = '{spec.key_env}': this environment variable is not set")
            return HttpJudge(spec.url, spec.model, key, timeout_s=spec.timeout_s)
        case RewardModelJudgeSpec():
            return RewardModelJudge(scorer(spec))


def scorer(spec: RewardModelJudgeSpec) -> Callable[[Sequence[Message]], float]:
    """Return a function that gives a conversation, which ends with an answer, its score."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from tandem.build.built_model import pick_device
    from tandem.model.load_checkpoint import load_whole, refuse_unfit
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import load_tokenizer

    field = "environment.judge.path"
    config = refuse_unfit(spec.path, "main", field, reward_model=True)
    if config.num_labels != 1:
        raise SpecError(f"{field} = '{spec.path}': has {config.num_labels} labels; a reward model has one")
    renderer = Renderer(load_tokenizer(spec.path, "main", field))
    device = pick_device(spec.device)
    module: Any = load_whole(AutoModelForSequenceClassification, spec.path, field).eval().to(device)
    context = module.config.get_text_config().max_position_embeddings

    def score(messages: Sequence[Message]) -> float:
        ids, _ = renderer.conversation(messages)
        if len(ids) > context:
            raise EpisodeFailed("judge", f"judge: {len(ids)} tokens do not fit the reward model's context of {context}")
        with torch.no_grad():
            return module(input_ids=torch.tensor([ids], device=device)).logits[0, 0].item()

    return score
