"""The body of `POST /train`: samples of four kinds, and how to train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from tandem.data.conversation import BadRow, parse_row
from tandem.data.preference_pairs import parse_pair
from tandem.errors import TandemError
from tandem.online.messages import Sequence1, Teaching, to_wire
from tandem.online.self_distillation import ANSWERS, judge_messages, most_tokens
from tandem.rollout.recorded_producer import record, record_pair
from tandem.rollout.recorder import RecorderRenderer
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.openai.strict import Strict
from tandem.spec.online import OnlineSpec, TeachSpec
from tandem.spec.optim import ApolloSpec
from tandem.types import NO_VERSION, Group, Trajectory

Ids: TypeAlias = list[Annotated[int, Field(ge=0, lt=2**31)]]
Kind: TypeAlias = Literal["messages", "ids", "pair"]

MAX_TOKENS = 1_000_000
"""Most tokens of one job."""
MAX_SAMPLED_TOKENS = 400_000
"""Most tokens of a job whose tokens have logprobs and versions, so that it fits one frame to the trainer process."""


class SampleBody(Strict):
    """One of: `messages`; `context_ids` with `continuation_ids`; `prompt`, `chosen` and `rejected`."""

    messages: list[dict[str, Any]] | None = None
    context_ids: Ids | None = None
    continuation_ids: Ids | None = None
    prompt: str | list[dict[str, Any]] | None = None
    chosen: str | list[dict[str, Any]] | None = None
    rejected: str | list[dict[str, Any]] | None = None
    reward: Annotated[float, Field(ge=-100, le=100)] | None = None
    """With messages or ids: the sample's reward. Left out: the sample is a demonstration."""

    @model_validator(mode="after")
    def _one_kind(self) -> SampleBody:
        fields = self.model_fields_set - {"reward"}
        if fields not in ({"messages"}, {"context_ids", "continuation_ids"}, {"prompt", "chosen", "rejected"},
                          {"chosen", "rejected"}):  # fmt: skip
            raise ValueError(
                "a sample is `messages`, or `context_ids` and `continuation_ids`, or `prompt`, `chosen`, `rejected`"
            )
        if self.reward is not None and self.kind == "pair":
            raise ValueError("reward: a pair has none, because it says which answer is better")
        return self

    @property
    def kind(self) -> Kind:
        return "messages" if self.messages is not None else "ids" if self.context_ids is not None else "pair"


class ConfigBody(Strict):
    """A table that older clients send with the samples."""

    lr: float | None = Field(default=None, gt=0, lt=1)
    """The same as the job's `lr`."""
    rank: int | None = Field(default=None, ge=1)
    """Must equal the rank of the server's adapters or of its optimizer's projection, which a job cannot change."""


class TrainBody(Strict):
    samples: Annotated[list[SampleBody], Field(min_length=1, max_length=65536)] | None = None
    session: str | None = Field(default=None, max_length=64)
    """The id of a conversation on this server, instead of samples."""
    reward: Annotated[float, Field(ge=-100, le=100)] | None = None
    """The session's reward; all its branches get it."""
    algorithm: Literal["sft", "self_distill", "dpo", "reward"] | None = None
    """Left out: the one that fits the samples. `self_distill`: the model samples answers and judges them itself, with
    the sample's last turn in the judge's prompt."""
    lr: float | None = Field(default=None, gt=0, lt=1)
    config: ConfigBody | None = None
    """The older form of `lr`, with a rank."""
    steps: int | None = Field(default=None, ge=1)
    """Number of steps. Left out: until the samples are known, at most `train.steps`."""
    known: float | None = Field(default=None, ge=0, lt=1)
    """An `sft` job ends early once every trained token has this probability. 0: it does not end early."""
    context_grad: Literal["full", "none"] | None = None
    kl_coef: float = Field(default=0.0, ge=0, le=100)
    """Weight of a KL term that holds the trained tokens near the version before the job."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    source: str = Field(default="", max_length=128)
    """Origin of the samples; replay limits the share of each source."""

    @model_validator(mode="after")
    def _samples_or_session(self) -> TrainBody:
        if (self.samples is None) == (self.session is None):
            raise ValueError("samples or session: send one of them")
        if (self.session is None) != (self.reward is None):
            raise ValueError("reward: send it with a session; samples have their own rewards")
        if self.lr is not None and self.config is not None and self.config.lr not in (None, self.lr):
            raise ValueError(f"config.lr = {self.config.lr:g} and lr = {self.lr:g}: send one of them")
        return self


@dataclass(frozen=True)
class SampleRequirements:
    """The model's properties that samples must fit."""

    renderer: RecorderRenderer
    context: int
    num_ids: int


@dataclass(frozen=True)
class Lesson:
    groups: list[list[Sequence1]]
    teaching: Teaching
    num_tokens: int


def lesson(body: TrainBody, spec: TeachSpec, model: SampleRequirements) -> Lesson:
    """Turn the samples into tokens and check the limits. RequestRefused names the field."""
    assert body.samples is not None
    if len(body.samples) > spec.max_samples:
        text = f"{len(body.samples)} samples; train.max_samples = {spec.max_samples} allows fewer in one job"
        raise RequestRefused(422, text, field="samples")
    algorithm = body.algorithm or _fitting(body.samples)
    for index, sample in enumerate(body.samples):
        if (_fitting([sample]), algorithm) != ("sft", "self_distill") and _fitting([sample]) != algorithm:
            text = f"algorithm '{algorithm}' does not learn from such a sample; send samples of one kind in a job"
            raise RequestRefused(422, text, field=f"samples.{index}")
    shown = algorithm == "self_distill"
    groups = [_group(sample, f"samples.{index}", model, shown) for index, sample in enumerate(body.samples)]
    sizes = [_with_answers(each) if shown else len(each.ids) for group in groups for each in group]
    num_tokens = _bounded_tokens(sum(sizes), MAX_SAMPLED_TOKENS if shown else MAX_TOKENS, "samples")
    teaching = teaching_of(algorithm, body, spec)
    return Lesson([[to_wire(each) for each in group] for group in groups], teaching, num_tokens)


def lesson_of_session(body: TrainBody, trajectories: Sequence[Trajectory], spec: TeachSpec) -> Lesson:
    """Return the lesson of a session's trajectories. Branches with different rewards form one group to compare;
    otherwise each branch is a group of its own."""
    if body.algorithm not in (None, "reward"):
        text = f"algorithm '{body.algorithm}' does not learn from a session; leave it out"
        raise RequestRefused(422, text, field="algorithm")
    differ = len({each.reward for each in trajectories}) > 1
    teaching = teaching_of("group" if differ else "reward", body, spec)
    group = [to_wire(each) for each in trajectories]
    groups = [group] if differ else [[each] for each in group]
    num_tokens = _bounded_tokens(sum(len(each.ids) for each in group), MAX_SAMPLED_TOKENS, "session")
    return Lesson(groups, teaching, num_tokens)


def _with_answers(shown: Trajectory) -> int:
    first = shown.trained.index(True)
    return ANSWERS * (first + most_tokens(len(shown.ids) - first))


def _bounded_tokens(count: int, most: int, field: str) -> int:
    if count > most:
        raise RequestRefused(
            422, f"{count} tokens, answers included; a job of this kind may have at most {most}", field=field
        )
    return count


def check_rank(body: TrainBody, spec: OnlineSpec) -> None:
    """Raise RequestRefused if the job names another rank than the server's."""
    if body.config is None or (asked := body.config.rank) is None:
        return
    of_optimizer = spec.optimizer.rank if isinstance(spec.optimizer, ApolloSpec) else None
    had = of_optimizer if spec.model.lora is None else spec.model.lora.rank
    if asked != had:
        has = "trains all weights, and has no rank" if had is None else f"has rank {had}"
        raise RequestRefused(422, f"{asked}: this server {has}; leave it out, or change the spec", field="config.rank")


def teaching_of(algorithm: str, body: TrainBody, spec: TeachSpec) -> Teaching:
    if body.known and algorithm != "sft":
        raise RequestRefused(422, f"algorithm '{algorithm}' does not support it; leave it out", field="known")
    until_known = spec.known if body.steps is None else 0.0
    lr = body.lr or (body.config.lr if body.config is not None else None) or spec.lr
    return Teaching(
        algorithm,
        _bounded("lr", lr, spec.max_lr),
        int(_bounded("steps", body.steps or spec.steps, spec.max_steps)),
        body.context_grad or spec.context_grad,
        body.seed,
        body.kl_coef,
        0.0 if algorithm != "sft" else until_known if body.known is None else body.known,
    )


def _bounded(field: str, value: float, most: float) -> float:
    if value > most:
        raise RequestRefused(422, f"{value:g} is more than train.max_{field} = {most:g} of this server", field=field)
    return value


def _fitting(samples: Sequence[SampleBody]) -> str:
    first = samples[0]
    return "dpo" if first.kind == "pair" else "sft" if first.reward is None else "reward"


def _group(sample: SampleBody, field: str, model: SampleRequirements, shown: bool) -> Group:
    try:
        group = _shown(sample, field, model) if shown else _read(sample, field, model)
    except BadRow as error:
        raise RequestRefused(422, str(error), field=field) from error
    except TandemError as error:
        if isinstance(error, RequestRefused):
            raise
        raise RequestRefused(422, str(error), field=field) from error
    for each in group:
        if not each.num_trained:
            raise RequestRefused(422, "has no token to train: the assistant says nothing", field=field)
        if len(each.ids) > model.context:
            text = f"{len(each.ids)} tokens are more than the {model.context} of the model's context"
            raise RequestRefused(422, text, field=field)
    return group


def _read(sample: SampleBody, field: str, model: SampleRequirements) -> Group:
    if sample.kind == "pair":
        given = {"prompt": sample.prompt, "chosen": sample.chosen, "rejected": sample.rejected}
        return record_pair(model.renderer, *parse_pair(given), name=field)
    if sample.kind == "messages":
        trajectory = record(model.renderer, parse_row({"messages": sample.messages}), field)
    else:
        trajectory = _of_ids(sample.context_ids or [], sample.continuation_ids or [], field, model)
    trajectory.reward = sample.reward or 0.0
    return [trajectory]


def _shown(sample: SampleBody, field: str, model: SampleRequirements) -> Group:
    """Return the last turn of a conversation twice: after its context, and after a context that also shows the turn."""
    if sample.kind != "messages":
        raise BadRow("self_distill shows the demonstration as text; send messages")
    messages = parse_row({"messages": sample.messages})
    last = messages[-1]
    if last.get("tool_calls") or not last["content"].strip():
        raise BadRow("self_distill shows the last turn as text, and this turn has no text")
    judged = judge_messages(messages[:-1], last["content"])
    pair = [record(model.renderer, [*context, last], field) for context in (messages[:-1], judged)]
    for each in pair:  # the assistant's earlier turns are context
        begins = max(at for at, trained in enumerate(each.trained) if trained and not each.trained[at - 1])
        each.trained[:begins] = [False] * begins
        if begins + most_tokens(each.num_trained) > model.context:
            raise BadRow(f"the model's context of {model.context} tokens has no room for answers beside the shown turn")
    return pair


def _of_ids(context: list[int], continuation: list[int], field: str, model: SampleRequirements) -> Trajectory:
    if not context:
        raise RequestRefused(422, "is empty; send at least one token", field=f"{field}.context_ids")
    for name, ids in (("context_ids", context), ("continuation_ids", continuation)):
        if ids and max(ids) >= model.num_ids:
            raise RequestRefused(
                422, f"id {max(ids)} does not exist; ids end at {model.num_ids - 1}", field=f"{field}.{name}"
            )
    ids = [*context, *continuation]
    nothing, trained = len(ids), [False] * len(context) + [True] * len(continuation)
    return Trajectory(ids, trained, [0.0] * nothing, [NO_VERSION] * nothing, status="recorded", task_id=field)
