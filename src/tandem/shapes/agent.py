"""Between the control plane and the agent of one attempt.

The control plane starts a job with the argv `tandem agent URL`, URL = `https://HOST/api/attempts/ID`, and the attempt's
token in the variable TANDEM_ATTEMPT_TOKEN. The agent sends it with each request, `Authorization: Bearer TOKEN`:

1. POST URL/claim    ClaimBody  -> Claimed.   409: the attempt is another execution's, or closed. End; write nothing.
2. POST URL/append   AppendBody -> Appended.  Every second: a sign of life, and what grew in the run directory.
   409 with code "fenced": the attempt was closed. End the trainer at once; write nothing more.
3. POST URL/end      EndBody    -> Ended.     The first end counts; only it may be repeated after that.

Errors have the form of every Tandem service: `{"error": {"code", "message", "field"?}}`. 401: the token is wrong. 408,
429, 5xx or no answer: nothing is known; send the same request again. Every request may be sent twice.

The control plane keeps a mirror of the run directory's small files, byte by byte. A file has a generation, which begins
at 1, and the mirror has its first `size` bytes. A piece goes on exactly there. Or it begins the next generation, of
which the first `offset` bytes are those that the mirror has: offset 0 replaces the file (status.json, for example),
another cuts it back (metrics.jsonl after a resume). A piece that does not fit changes nothing; the answer says where
each file is, and the agent goes on from there.

The token is made by `tandem.control.tokens.attempt_token(secret, attempt_id)`, the same for each launch of the attempt.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from tandem.shapes.base import Answer, Asked

TOKEN_VARIABLE = "TANDEM_ATTEMPT_TOKEN"
FENCED = 75
"""The exit code of an agent whose attempt is another execution's, or closed."""
PIECE_BYTES = 2 * 2**20
"""The most data of one piece."""
APPEND_BYTES = 8 * 2**20
"""The most data of one request, over all its pieces. A file that is replaced by one piece is replaced atomically; what
follows a first piece is appended to it."""

Instance = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,100}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, StringConstraints(min_length=1, max_length=300)]
"""Relative to the run directory, with "/" between its parts; no "." or ".." among them."""
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Stream(Answer):
    """How far the mirror of one file is."""

    generation: int
    size: int


class ClaimBody(Asked):
    """The first act of an execution."""

    instance: Instance
    """Of this execution alone: a new random text for each process that claims."""
    host: str = Field(default="", max_length=200)
    boot_id: str = Field(default="", max_length=100)
    pid: Count = 0
    gpus: tuple[str, ...] = Field(default=(), max_length=64)
    release: str = Field(default="", max_length=40)
    """The agent's Tandem version."""


def weights_of(model: str, run: str, step: int) -> str:
    """Return what names a model together with its weights: a name that was taken away may come back with others."""
    return f"{model}={run}@{step}"


class AdapterOrder(Answer):
    """A checkpoint of an adapter that a replica serves beside its own, over the same base."""

    model: str
    run: str
    step: int

    @property
    def weights(self) -> str:
        return weights_of(self.model, self.run, self.step)


class ServeOrder(Answer):
    """What a replica serves."""

    run: str
    """The run whose directory on this machine holds the weights."""
    step: int
    feedback: bool = False
    """Keep each chat, and take feedback for its answers."""
    engine: Literal["hf", "vllm"] = "hf"
    base: str = ""
    """Which base its adapter is over; empty: it is a whole model."""
    model: str
    """The name to serve it under."""
    token: str = Field(repr=False)
    """That the server asks of its callers."""


class CostLimits(Answer):
    """What an agent keeps to by itself, also while the control plane is away. In seconds from this answer on."""

    stop_s: float
    """Until the trainer must save and end."""
    cancel_s: float
    """Until it is cancelled."""
    spent_s: float
    """Until the run has cost all that it may. The agent has ended by then, even if the server does not know the end."""


class Claimed(Answer):
    """The attempt is this execution's. What it needs to train."""

    attempt: str
    run: str
    n: int
    """The number of this attempt of the run, from 1; above 1 the run directory may exist already, and is resumed."""
    name: str
    """The run's name."""
    spec_toml: str
    """The whole spec, with absolute defaults filled in by the submitter; `tandem train` reads it as it is."""
    secrets: dict[str, str] = Field(default_factory=dict, repr=False)
    """Variables for the environment of the trainer's process, and for nothing else: no file, argv or log."""
    serve: ServeOrder | None = None
    """Serve this instead of training."""
    lease_s: float
    """The control plane closes the attempt after this long without a sign of life."""
    limits: CostLimits | None = None
    """None: the run may cost what it will."""
    streams: dict[str, Stream] = Field(default_factory=dict)
    """How far the mirror of each file is, from attempts before."""


class SignOfLife(Asked):
    """What progress.json says (runs/liveness.py)."""

    ticks: Count = 0
    limit_s: float = Field(default=3000.0, gt=0, le=10**7)
    stage: str = Field(default="", max_length=100)
    step: Count = 0


class Piece(Asked):
    """Bytes of one file."""

    file: FileName
    generation: Count
    offset: Count
    data: bytes = Field(max_length=PIECE_BYTES)
    """In JSON: base 64."""
    sha256: Sha256
    """Of `data`."""


class AppendBody(Asked):
    """A sign of life, and what grew."""

    instance: Instance
    sign: SignOfLife = SignOfLife()
    serving: str = Field(default="", pattern=r"^(http://127\.0\.0\.1:[0-9]{1,5})?$")
    """Where this replica answers now; empty: it does not, or it trains. The server asks no other address than its own
    machine's, whatever an agent says."""
    served: dict[
        Annotated[str, StringConstraints(max_length=200)], Annotated[str, StringConstraints(max_length=4000)]
    ] = Field(default={}, max_length=1000)
    """The models that this replica has, by `weights_of`: empty, or why one is refused."""
    pieces: tuple[Piece, ...] = Field(default=(), max_length=256)


class Appended(Answer):
    """What the execution should do now, and where the mirror is."""

    want: Literal["run", "stop", "cancel"]
    """stop: save a checkpoint and end. cancel: end within a few seconds."""
    lease_s: float
    adapters: tuple[AdapterOrder, ...] = ()
    """For a replica over a base: what it should serve now."""
    streams: dict[str, Stream] = Field(default_factory=dict)
    """Of the files that the request named. A file whose stream is not behind its last piece: go on from there."""


class FileDigest(Asked):
    """One whole file, as it is in the run directory."""

    size: Count
    sha256: Sha256


class EndBody(Asked):
    """How the execution ended. The first such word counts."""

    instance: Instance
    state: Literal["succeeded", "failed", "cancelled", "stopped"]
    """stopped: the machine or the owner asked the trainer to end, and it saved."""
    why: str = Field(default="", max_length=4000)
    retriable: bool = False
    """Whether a further attempt may succeed (runs/failure_rules.toml)."""
    exit_code: int | None = None
    files: dict[FileName, FileDigest] = Field(default={}, max_length=10_000)
    """The files that the mirror must hold. If one differs, the end is not written, and the answer names it. An agent
    that cannot bring a file over leaves it out."""


class Ended(Answer):
    """`written`: the end is in the database. Otherwise append what `differ` names, and send the end again."""

    written: bool
    differ: dict[str, Stream] = Field(default_factory=dict)
