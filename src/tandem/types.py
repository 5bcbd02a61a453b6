"""The data on the move. Plain dataclasses; nothing here imports torch, tensors are only named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

Message: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content`, and what else a template reads (`tool_calls`, `name`). A content is a text, or
parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": "sha256:...", "size": [width, height]}`."""


def text_of(content: Any) -> str:
    """Return a message's content as text for people: an image is a mark with its digest and size."""
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return str(content or "")
    return "".join(_part_text(part) for part in cast("Sequence[Any]", content))


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    told = cast("Mapping[str, Any]", part)
    if "text" in told:
        return str(told["text"])
    image = told.get("image")
    named = image.removeprefix("sha256:")[:12] if isinstance(image, str) and image.startswith("sha256:") else "?"
    return f"[image {named} {'x'.join(map(str, told.get('size') or ()))}".rstrip() + "] "


Metrics: TypeAlias = dict[str, float]
"""Numbers with slash names."""

TokenSums: TypeAlias = Mapping[str, "float | Tensor"]
"""Metrics of a micro-batch, summed over its tokens; a tensor of one number is read after the step."""

Measure: TypeAlias = Literal["accuracy", "reward", "loss"]
"""What held-out scores are: the share of right answers; rewards, on the scale of their environment; or a loss, which is
better where it is lower."""

MEASURED = ("time/", "memory/", "parallel/")
"""What keys begin with that are measurements of a machine: the only ones that may differ between two equal runs."""

MAX_METRICS = 256
"""Of one trajectory. An environment that says more has failed there, and not where its group is sent."""

MAX_NUMBER = 1e30
"""The largest reward, shaping or metric, of either sign: any number of them can be added up, also in float32."""

NUMBERS = f"{-MAX_NUMBER:g} to {MAX_NUMBER:g}"
"""What may be said of them."""

NO_VERSION = -1
"""The version of a token that no policy sampled: prompts, template glue, recorded data."""

UNKNOWN_VERSION = -2
"""The version of a token that some policy sampled, and nothing shows which. It never passes for a current one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: its opening messages and whatever its environment needs to score it."""

    id: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment returns after an episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


OnUpdate: TypeAlias = Literal["continue", "finish", "restart"]
"""What becomes of an engine's requests under way when a version comes: they go on under it, they end under the old one
first, or they are sampled again."""

Wish: TypeAlias = Literal["", "follow", "pin", "restart"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must be."""

    field: str
    """The field of the request that asks for it, for errors."""
    lark: str
    """The grammar in llguidance's form of Lark."""
    json_schema: str = ""
    """The same as a JSON schema, for engines that take only that; empty if it is more than that."""
    after: str = ""
    """The completion is free up to this text, such as the end of a thought."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What changes the model's logits before temperature, top-k and top-p do, as vLLM does it. A trainer computes
    logprobs without it, so completions with a shape are not trained on."""

    min_p: float = 0.0
    """Drops tokens whose probability is less than this share of the most likely token's."""
    repetition_penalty: float = 1.0
    """Of tokens of the prompt and the answer: divides positive logits, multiplies negative ones."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the answer has the token."""
    presence_penalty: float = 0.0
    """Subtracted once if the answer has the token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, with what is added to their logits."""
    grammar: Grammar | None = None

    @property
    def engaged(self) -> tuple[str, ...]:
        """The request fields that change something."""
        named = tuple(each.name for each in fields(self) if each.name != "grammar")
        own = tuple(name for name in named if getattr(self, name) != getattr(PLAIN, name))
        return own if self.grammar is None else (*own, self.grammar.field)


PLAIN = Shape()
"""Changes nothing."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; the logprobs are then those of the untempered model."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Added to the tokenizer's own end-of-turn ids."""
    seed: int = 0
    """Equal seeds give equal tokens, whatever else is in the batch."""
    on_update: Wish = ""
    """What becomes of it when new weights come: it goes on under them (`follow`), ends under those that it began with
    (`pin`), or is sampled again from its prompt (`restart`). Empty: as the engine does by itself."""
    urgent: bool = False
    """Before all that wait, and beside one more than may run: a trainer stands still until it is answered."""
    share: str = ""
    """Requests of one share take turns with those of others, however many each has. Empty: one share like any other."""
    told_within_s: float = 0.0
    """How much later than sampled a token may be told to the caller's `on_token`; each telling costs both processes
    work. 0: as soon as the engine can."""
    shape: Shape = PLAIN
    top_logprobs: int = 0
    """Also return so many of the likeliest tokens at each place."""
    images: tuple[PlacedImage, ...] = ()
    """Those of the prompt."""

    @property
    def extras(self) -> tuple[str, ...]:
        """The request fields that only some engines have."""
        more = {"top_logprobs": self.top_logprobs, "images": self.images}
        return (*self.shape.engaged, *(name for name, asked in more.items() if asked))


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among a sequence's tokens, where it has the place of `length` pads. Its bytes are in an ImageStore."""

    digest: str
    offset: int
    """The first of its tokens."""
    grid: tuple[int, int, int]
    """Its patches in time, height and width, before the model merges them."""
    length: int

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> PlacedImage:
        time, height, width = told["grid"]
        return cls(told["digest"], told["offset"], (time, height, width), told["length"])

    @property
    def merge(self) -> int:
        """The side of a square of patches that becomes one token."""
        return math.isqrt(math.prod(self.grid) // self.length)

    @property
    def end(self) -> int:
        return self.offset + self.length


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive tokens made by one version of the weights."""

    version: int
    count: int


Alternatives: TypeAlias = Sequence[tuple[int, float]]
"""The likeliest tokens at one place with their logprobs, likeliest first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, the one that ended it included; logprobs are under the distribution they were drawn from."""

    ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: FinishReason
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    """At each place; empty unless the request asks for `top_logprobs`."""

    @property
    def versions(self) -> list[int]:
        return [span.version for span in self.spans for _ in range(span.count)]


@dataclass(frozen=True, slots=True)
class Thought:
    """What a turn of the assistant says to itself before it answers."""

    num_tokens: int
    """The mark that closes it included."""
    closed: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the assistant asks of a tool. One that cannot be read is data too: no name, and `error` says why."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    raw: str = ""
    """As it was written, between its marks."""


TrajectoryStatus: TypeAlias = Literal["finished", "truncated", "recorded"]


@dataclass(slots=True)
class Trajectory:
    """What happened, in token space. All per-token lists have the length of `ids`."""

    ids: list[int]
    trained: list[bool]
    """True where the loss counts: tokens that the policy sampled, or that a recording shows as the assistant's."""
    logprobs: list[float]
    """Of the sampled tokens, as the engine reported them; 0.0 elsewhere."""
    versions: list[int]
    reward: float = 0.0
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    shaping: float = 0.0
    """Added to the reward where trajectories with different rewards are compared; no difference by itself."""
    thinking_tokens: int = 0
    """Of the sampled ones: in thoughts, all turns together."""
    unclosed: bool = False
    """Some turn ended within its thought, so it was no answer."""
    task_id: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    """The same conversation as text, for people to read; never tokenised again."""
    teacher_logprobs: list[float] = field(default_factory=list[float])
    """Of each token, under a served teacher, once it has scored them; 0.0 for the first. Empty: there is none."""
    advantages: list[float] = field(default_factory=list[float])
    """Of each token, where an environment says them itself: they take the place of the algorithm's. Empty: it does
    not."""
    images: list[PlacedImage] = field(default_factory=list[PlacedImage])
    """Those among `ids`, in their order."""

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    @property
    def num_unstamped(self) -> int:
        """Of the trained ones: neither recorded nor sampled."""
        if self.status == "recorded":
            return 0
        return sum(one and version == NO_VERSION for one, version in zip(self.trained, self.versions, strict=True))


Group: TypeAlias = list[Trajectory]
"""Siblings: trajectories of one task, compared with each other."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to play one group. `order` counts starts, over the whole run, and fixes the hand-out order."""

    order: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What a loss divides by: counts over the whole optimizer step, not over one micro-batch."""

    tokens: int
    sequences: int


Spans: TypeAlias = "tuple[Tensor, Tensor, int, int, Tensor | None]"
"""Where each span's queries and keys begin (and the last ones end), the longest of both, and which tokens are the keys
if not all of them in their order. A plain tuple: a compiler looks into it."""


class PackedRows(NamedTuple):
    """Rows one behind the other, without their padding: T tokens of all (ops/packed_attention.py)."""

    spans: Spans
    tokens_T: Tensor
    """Flat index into the micro-batch's rows: what is no padding."""
    place_of: Tensor
    """The way back: of a flat index, its place among the T."""


@dataclass(slots=True)
class ImageRows:
    """The images of packed rows. B rows, T positions a row, P places of images."""

    rotary_3BT: Tensor
    """Positions in time, height and width, as the model's rotary embedding has them."""
    places_P: Tensor
    """Flat index into B*T of each place that an image has: all of the first image's, then the second's."""
    digests: list[str]
    """Of the images, in that order."""


@dataclass(slots=True)
class MicroBatch:
    """Rows of packed sequences. B rows, T positions a row, N trained tokens (row-major order)."""

    ids_BT: Tensor
    positions_BT: Tensor
    """Restart at 0 with each sequence."""
    segments_BT: Tensor
    """Which sequence of its row a position belongs to; -1 is padding."""
    parents_BT: Tensor
    """The segment that a position also sees: the prompt that its sequence shares with siblings, or its own segment."""
    packed: PackedRows
    """The same rows for attention that needs no mask."""
    source_N: Tensor
    """Flat index into B*T of the position that predicts each trained token."""
    target_N: Tensor
    """Flat index into B*T of each trained token."""
    credit_N: Tensor
    behaviour_N: Tensor
    """Logprobs as the engine reported them."""
    versions_N: Tensor
    length_N: Tensor
    """Trained tokens of the sequence that each trained token belongs to."""
    sequence_N: Tensor
    """Which of the micro-batch's S sequences each trained token belongs to; a sequence is never split."""
    group_S: Tensor
    """Which of the step's groups each sequence belongs to."""
    reference_N: Tensor | None = None
    """Logprobs of the reference policy (or of the teacher), where the algorithm asks for them."""
    kl: float = 0.0
    """KL(policy, reference), estimated on the step's `Batch.mismatched`, where the algorithm asks for it."""
    hold: float = 0.0
    """Not 0: these tokens are not learned. The loss is the policy's KL divergence from the reference at each of them,
    over the whole vocabulary, times this."""
    images: ImageRows | None = None

    def pair_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum of each pair's values, where every group is a pair of answers."""
        groups: Any = self.group_S
        pairs, pair_S = groups.unique(return_inverse=True)
        assert len(groups) == 2 * len(pairs), "a pair was split over two micro-batches"
        return values_N.new_zeros(len(pairs)).index_add(0, pair_S[self.sequence_N], values_N)


@dataclass(slots=True)
class Batch:
    """The packed samples of one optimizer step."""

    micro: list[MicroBatch]
    totals: Totals
    metrics: Metrics = field(default_factory=dict[str, float])
    task_ids: list[str] = field(default_factory=list[str])
    mismatched: list[MicroBatch] = field(default_factory=list["MicroBatch"])
    """Samples without credit, where the algorithm asks for an estimate of the KL on them. They have no gradient."""


@dataclass(slots=True)
class TokenLogprobs:
    """The policy's view of a micro-batch's N trained tokens."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Detached: a metric, not a term of the loss."""


WeightKind: TypeAlias = Literal["live", "full", "adapter"]
"""live: the trainer's own tensors, under their module's names. full: as a checkpoint has them, adapters merged.
adapter: only what LoRA adds, under PEFT's names."""


class Part(NamedTuple):
    """A rectangle of a named tensor: all of it on one rank, some rows of it where several ranks train."""

    name: str
    tensor: Tensor
    row_start: int
    col_start: int
    full_shape: tuple[int, ...]


Fingerprints: TypeAlias = Mapping[str, str]
"""By tensor. Of content that was copied: its digest. Of memory that is shared: which memory it is."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version on the move. `tensors()` yields them one at a time, and can be asked again."""

    version: int
    kind: WeightKind
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    adapter: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What an adapter's tensors do not say themselves, as PEFT writes it: r, lora_alpha, target_modules."""
    expected: Fingerprints = field(default_factory=dict[str, str])
    """What the sender says they are, where they arrived from elsewhere. They are compared before anything is served."""
    path: str = ""
    """The directory that they lie in, where they do."""
    rows: Callable[[], Iterator[Part]] | None = None
    """What this rank holds, where several ranks train; `tensors()` then yields nothing that is whole."""

    def parts(self) -> Iterator[Part]:
        """Yield what this process holds: whole tensors, or its rows of them."""
        if self.rows is not None:
            yield from self.rows()
            return
        for name, tensor in self.tensors():
            yield Part(name, tensor, 0, 0, tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Sent:
    """The trainer's word about one version: what was sent, in the form in which it is to be served."""

    version: int
    mode: str
    fingerprints: Fingerprints
    bytes_moved: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By phase; docs/sync.md says which there are."""
    how: Literal["digest", "identity", "none"] = "digest"
    """What the fingerprints are."""
    transport: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where a bridge has several ways: `requested`, `engaged`, and `why` it was none of the faster ones."""


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's word about the version that it serves from now on."""

    version: int
    fingerprints: Fingerprints
    """Taken from the memory that forward passes read, after the flip."""
    engines: tuple[str, ...] = ()
    """Boot ids."""
    cache_epoch: int = 0
    """Goes up whenever everything that was computed with older weights is forgotten."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By phase; docs/sync.md says which there are."""
    read_back: bool = True
    """False: the engine's memory cannot be read, and fingerprints are of the files that it was given."""
    lent_bytes: int = 0
    """Of GPU memory, that the trainer had the use of since the version before."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Why we believe that the engines now serve `version`: a row of the ledger."""

    version: int
    mode: str
    verified: Literal["digest", "identity", "canary", "none"]
    """digest: both sides computed the same one, of every tensor. identity: every served tensor is the trainer's own
    memory. canary: the engine was given what was sent; that it serves that, its logprobs alone say. none: there is
    nothing that serves."""
    tensors: int
    bytes_moved: int
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By phase, and `total`."""
    digest: str = ""
    """Of all fingerprints together."""
    engines: tuple[str, ...] = ()
    """Boot ids of the engines that answered."""
    cache_epoch: int = 0
    logprob_gap: float = 0.0
    """Between trainer and engine about the canary's tokens: the mean of its absolute value, in nats."""
    gap_limit: float = 0.0
    canary_tokens: int = 0
    lent_bytes: int = 0
    """Of GPU memory that the engines gave back while the trainer made this version."""
    attempts: int = 1
    """More than one where a partner had to be taken back."""
    transport: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of a bridge that has several: `requested`, `engaged`, and `why` it was none of the faster ones."""
