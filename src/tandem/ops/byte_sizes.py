"""Compute sizes in bytes from shapes, for runs that allocate and account for memory and for plans.

Nothing here imports torch. The optimizers allocate their state by `state_shapes`, the lm-head cuts its chunks by
`pieces`, and the embedded engine grows its cache by `cache_held`. `peak` adds the parts up, for both
train/memory_accounting.py and runs/planner/memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeAlias

Dims = tuple[int, ...]

# --- parameters


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: attention with grouped keys and values, and a gated MLP."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    context: int = 0
    tower: int = 0
    """Parameters of a frozen vision tower beside the decoder."""
    pixels: int = 0
    """The side of the square of an image that becomes a token."""
    teacher: int = 0
    """Parameters of a frozen teacher beside the model."""
    masks: bool = False
    """A row of one sequence needs a mask, too, where rows are not packed: attention has a sliding window."""
    why_not_rows: ClassVar = ""
    recurrent: ClassVar = False
    packs: ClassVar = True

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, Dims]:
        """Return the linear layers of a decoder layer, as [out, in]."""
        return {
            "q_proj": (self.query, self.hidden),
            "k_proj": (self.key, self.hidden),
            "v_proj": (self.key, self.hidden),
            "o_proj": (self.hidden, self.query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def vectors(self) -> list[int]:
        """Return the sizes of the norms and biases of a decoder layer."""
        found = [self.hidden, self.hidden] + [self.head_dim, self.head_dim] * self.qk_norm
        found += [self.query, self.key, self.key] * self.qkv_bias + [self.hidden] * self.out_bias
        return found + [self.intermediate, self.intermediate, self.hidden] * self.mlp_bias

    @property
    def linear_numbers(self) -> int:
        """Return the number of parameters of all linear layers but the head."""
        return sum(map(prod, self.linears.values())) * self.layers

    @property
    def each_layer(self) -> list[list[Dims]]:
        """Return the tensors of each layer."""
        return [[*self.linears.values(), *((size,) for size in self.vectors())]] * self.layers

    @property
    def root(self) -> list[Dims]:
        """Return the tensors beside the layers."""
        return [*self.tables, (self.hidden,)]

    @property
    def large(self) -> list[Dims]:
        """Return tensors of which one is the largest."""
        return self.tables

    @property
    def tables(self) -> list[Dims]:
        """Return the embedding, and the head if it has its own weights."""
        return [(self.vocab, self.hidden)] * (1 if self.tied else 2)

    @property
    def numbers(self) -> dict[str, int]:
        """Return the number of parameters by component."""
        attention = sum(prod(self.linears[name]) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        mlp = sum(prod(self.linears[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        return {
            "embedding": self.vocab * self.hidden,
            "attention": attention * self.layers,
            "mlp": mlp * self.layers,
            "norms and biases": sum(self.vectors()) * self.layers + self.hidden,
            "head": 0 if self.tied else self.vocab * self.hidden,
        }

    @property
    def total(self) -> int:
        return sum(self.numbers.values())

    @property
    def held(self) -> int:
        """Return the number of all parameters, those of the tower among them."""
        return self.total + self.tower

    def position_bytes(self, width: int) -> int:
        """Return the bytes of keys and values of a token."""
        return position_bytes(self.layers, self.kv_heads, self.head_dim, width)

    def state_bytes(self, width: int) -> int:
        """Return the bytes of the states of a sequence."""
        return 0


IMAGE_CACHE_BYTES = 2**29
"""Of what a vision tower makes of images, kept on its device."""

# --- optimizers

ROWS_8BIT, FEWEST_8BIT = 256, 4096
UPDATE_CHUNK = 2**23
"""Numbers that are updated together: the temporary memory of an update is needed in addition to all gradients."""


def state_shapes(kind: str, like: Dims, rank: int = 1) -> dict[str, tuple[Dims, int]]:
    """Return the optimizer state of one parameter: name -> (shape, bytes per number)."""
    if kind == "adafactor" and len(like) > 1:
        return {"row_square": ((*like[:-1], 1), 4), "column_square": ((*like[:-2], 1, like[-1]), 4)}
    if kind == "adafactor":
        return {"square": (like, 4)}
    if kind == "muon":
        return {"momentum": (like, 4)}
    if kind == "apollo":
        m, n = sorted(like[-2:])
        stack = like[:-2]
        moment = (*stack, min(rank, m), n)
        return {"momentum": (moment, 4), "variance": (moment, 4), "norm": (stack, 4), "count": (stack, 4)}
    if kind == "adamw_8bit" and len(like) > 1 and prod(like) >= FEWEST_8BIT:
        scales = (like[0], -(-prod(like[1:]) // ROWS_8BIT))
        return {
            key: value
            for moment in ("exp_avg", "exp_avg_sq")
            for key, value in ((moment, (like, 1)), (f"{moment}_scale", (scales, 4)))
        }
    return {"exp_avg": (like, 4), "exp_avg_sq": (like, 4)}


def state_bytes(kind: str, like: Dims, rank: int = 1) -> int:
    return sum(prod(dims) * width for dims, width in state_shapes(kind, like, rank).values())


def update_bytes(numbers: Iterable[int], undivided: Iterable[int], *, narrow: bool) -> int:
    """Return the temporary memory of an update, besides state and gradients. `undivided`: sizes of tensors that are
    updated whole.

    These are value, gradient, old value, rounded value and the terms of two expressions, in fp32; for fp32 weights,
    value and gradient exist already.
    """
    return (40 if narrow else 20) * max(min(UPDATE_CHUNK, sum(numbers)), *undivided, 0)


# --- the lm-head

WORKSPACE_BYTES = 1_800_000_000
"""Temporary memory of the head's forward or backward pass, besides inputs, outputs and gradients."""
EAGER_COPIES = 3
"""Copies of the logits that exist at once without kernels: the logits, and two steps of an expression."""


@dataclass(frozen=True, slots=True)
class HeadNumbers:
    """Bytes per number in the head's computation, and numbers per tile."""

    sums: int
    forward: int
    backward: int
    multiple: int


def head_numbers(itemsize: int, *, on_gpu: bool) -> HeadNumbers:
    sums = 8 if itemsize == 8 else 4
    kernels = on_gpu and itemsize != 8
    logit = sums * (1 if kernels else EAGER_COPIES)
    slope = itemsize if on_gpu else sums
    return HeadNumbers(sums, logit, logit if slope == sums else logit + slope, 256 if kernels else 1)


def head_chunks(count: int, vocab: int, numbers: HeadNumbers, workspace: int) -> tuple[list[slice], int]:
    """Return the chunks of tokens for the forward pass, and the memory of one chunk."""
    bytes_a_token = vocab * numbers.forward
    chunks = list(pieces(count, workspace // bytes_a_token, numbers.multiple))
    return chunks, min(count, chunks[0].stop) * bytes_a_token if chunks else 0


def head_blocks(
    count: int, ids: int, width: int, numbers: HeadNumbers, wanted: tuple[bool, bool], workspace: int
) -> tuple[list[slice], int]:
    """Return the blocks of the vocabulary for the backward pass, and its temporary memory."""
    hidden_bytes = count * width * numbers.sums * wanted[0]
    bytes_an_id = count * numbers.backward + width * numbers.sums * wanted[1]
    blocks = list(pieces(ids, (workspace - hidden_bytes) // max(1, bytes_an_id), numbers.multiple))
    return blocks, hidden_bytes + (blocks[0].stop if blocks else 0) * bytes_an_id


def head_bytes(
    count: int, vocab: int, width: int, itemsize: int, *, on_gpu: bool, trained: bool, workspace: int = WORKSPACE_BYTES
) -> tuple[int, int]:
    """Return the temporary memory of the forward and of the backward pass over so many tokens."""
    numbers = head_numbers(itemsize, on_gpu=on_gpu)
    _, forward = head_chunks(count, vocab, numbers, workspace)
    _, backward = head_blocks(count, vocab, width, numbers, (True, trained), workspace)
    return forward, backward


def unfused_head_bytes(count: int, ids: int, top_p: float) -> int:
    """Return the temporary memory of a head that is computed in checkpointed chunks."""
    return min(WORKSPACE_BYTES, count * ids * bytes_a_logit(top_p))


def bytes_a_logit(top_p: float) -> int:
    """Return the temporary bytes per logit of a checkpointed chunk, in forward and backward."""
    return 24 if top_p >= 1 else 48


def pieces(total: int, most: int, multiple: int) -> Iterator[slice]:
    """Cut `total` into as few pieces as `most` allows, about equally long; the first is the longest."""
    most = max(most // multiple, 1) * multiple
    count = max(-(-total // most), 1)
    size = -(-total // (count * multiple)) * multiple
    for start in range(0, total, max(size, 1)):
        yield slice(start, min(start + size, total))


# --- keys and values


def position_bytes(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * layers * kv_heads * head_dim * itemsize


def cache_held(rows: int, length: int, most: int) -> tuple[int, int]:
    """Return the rows and length of the embedded engine's cache for a need. They are doubled up to `most` positions,
    and beyond exact but for a few positions. There is one row more than a power of two, for an urgent request."""
    wide, long = _doubled(8, rows - 1) + 1, _doubled(64, length)
    if wide * long <= most:
        return wide, long
    return rows, max(length, min(-(-length // 64) * 64, most // rows))


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


# --- a prompt that siblings share

Shares: TypeAlias = Callable[[Sequence[float], float], bool]
"""Returns whether sequences of these lengths, with a common beginning, become one tree of this many tokens."""


_KEPT_SHARE = 0.15


def keeps_gathered(asked: str, whole_bytes: float, gpu_bytes: float) -> bool:
    """Return whether ranks keep all weights that they gathered until a step ends: parallel.gather. `gpu_bytes`: 0 on a
    CPU."""
    return asked == "step" or (asked == "auto" and whole_bytes <= _KEPT_SHARE * gpu_bytes)


_SUMMED_SHARE = 0.25


def sums_of_ranks(asked: str, float32_bytes: float, gpu_bytes: float) -> str:
    """Return how gradients are summed over ranks: parallel.sums, or what becomes of its "auto". `float32_bytes`: of all
    gradients. `gpu_bytes`: 0 on a CPU."""
    if asked != "auto" or not gpu_bytes:
        return "round" if asked == "auto" else asked
    return "step" if float32_bytes <= _SUMMED_SHARE * gpu_bytes else "running"


def shares_never(alone: Sequence[float], tree: float) -> bool:
    return False


def shares_unmasked(alone: Sequence[float], tree: float) -> bool:
    """Without a mask, a tree costs its tokens."""
    return tree < sum(alone)


def shares_masked(hidden: int) -> Shares:
    """A layer costs 24 h^2 a token, and 4 h L^2 a masked row of length L."""

    def shares(alone: Sequence[float], tree: float) -> bool:
        return 6 * hidden * (sum(alone) - tree) > tree**2 - sum(length**2 for length in alone) / 2

    return shares


def shares_recurrent(shares: Shares) -> Shares:
    """Recurrent layers compute every sequence with its prompt: at most four times the positions of other layers, which
    bounds what a micro-batch keeps for its gradient."""
    return lambda alone, tree: shares(alone, tree) and sum(alone) <= 4 * tree


# --- all of it

GIVEN_BACK_BYTES = 2**27
"""Least size of weights and optimizer state at which returning free memory to the system is worth the time
(ops/release_host_memory.py)."""
MAPPED_ALONE_BYTES = 2**25
"""A block as large as this goes back to the host as soon as it is freed, also in backward (the same file)."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The memory of a training step by part, all in the same unit."""

    always: float
    """Weights, master, optimizer state, reference and all other permanent memory."""
    activations: float
    gradients: float
    """The gradients that exist at once."""
    num_micro: int
    head_forward: float
    head_backward: float
    largest: float
    """The largest gradient of one tensor."""
    update: float
    """Temporary memory of an update."""
    layer: float = 0.0
    """Extra memory of one layer in the backward pass: recomputed activations, and gradients inside the layer."""
    sums: float = 0.0
    """Sums of the gradients of earlier micro-batches, where they are added as a tree. 0: as `num_micro` says."""
    gathered: float = 0.0
    """Weights that a rank has whole for a while: of the layer at work, of the next one, and of the root."""
    reduced: float = 0.0
    """Buffers in which gradients are summed over ranks as backward ends, when nothing is gathered any more."""
    holes: float = 0.0
    """Freed memory that a host keeps until backward has ended."""


def peak(parts: MemoryParts) -> float:
    """Return the peak.

    At the beginning of the backward pass all activations exist, the head's gradient is computed, and all gradients of
    earlier micro-batches exist. At its end one layer's activations and all gradients exist.
    """
    summed = parts.sums or (parts.gradients if parts.num_micro > 1 else 0.0)
    head = max(parts.head_forward, parts.head_backward + parts.largest, parts.layer)
    begins = parts.activations + summed + parts.gathered + head
    ends = parts.gradients + parts.sums + parts.holes + max(parts.gathered + parts.layer, parts.reduced)
    return parts.always + max(begins, ends, parts.gradients + parts.update)


def heaped(parts: MemoryParts, *, scattered: bool) -> float:
    """Return the peak on a host whose freed memory is not returned to the system: no part reuses another's memory.

    `scattered`: fragmentation leaves gaps that are too small, so activations count twice.
    """
    activations = parts.activations * (2 if scattered else 1)
    head = max(parts.head_forward, parts.head_backward)
    of_ranks = parts.sums + parts.gathered + parts.reduced
    return parts.always + activations + head + parts.gradients + parts.update + of_ranks
