"""The tensors that vLLM computes itself and a trainer has, too: rotary tables, and constants of the configuration.

vLLM keeps cosines and sines by position, a trainer the frequencies that they come from. A version brings the trainer's;
they must be this engine's own. Otherwise both would compute different models with the same weights. A tensor that
the trainer does not have is only checked for changes. The decay of a Mamba layer is trained, and served in another
form.

P positions, F frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest

_NEAR = 1e-6  # relative; two builds of one formula differ in the last bit, two settings of it by far more
_NONE: Mapping[str, Any] = {}
_YARN = ("YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding")


class Derived(Protocol):
    def named(self) -> Mapping[str, Tensor]:
        """Return what this engine computes, in float32, under the trainer's names."""
        ...

    def check_received(self, name: str, tensor: Tensor) -> None:
        """Raise SyncError unless the trainer's tensor is this engine's."""
        ...

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Compute with exactly the trainer's tensor from now on."""
        ...

    def buffers(self) -> Iterator[Tensor]: ...

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        """Return its name, its memory, and a function that gives the digest it must have."""
        ...


class Rotary:
    """A rotary table of a model, checked against its frequencies."""

    CLASSES: ClassVar = (
        "RotaryEmbedding", "Llama3RotaryEmbedding", "MRotaryEmbedding", "Gemma4RotaryEmbedding",
        *_YARN,
    )  # fmt: skip
    """Classes whose table is the cosine and sine of position times frequency, times YaRN's factor, and nothing else."""

    def __init__(self, path: str, layer: Any, name: str, kind: str = "", settings: Mapping[str, Any] = _NONE) -> None:
        """`name`: the trainer's, of the module that has the frequencies. `kind`: of the layers that use this table, if
        other layers use another. `settings`: of the configuration, for these layers."""
        self._path, self._layer = path, layer
        before = f"{name}.{kind}_" if kind else f"{name}."
        self._names = (f"{before}inv_freq", f"{before}original_inv_freq")
        if type(layer).__name__ == "MRotaryEmbedding" and layer.scaling_factor is not None:
            raise SyncError(f"rotary: '{path}' scales its positions (YaRN) in three axes, in a way not known")
        is_yarn = type(layer).__name__ in _YARN
        self._factor: float = layer.mscale if is_yarn else 1.0
        if is_yarn and not math.isclose(self._factor, trainers := _yarn_factor(settings), rel_tol=_NEAR):
            raise SyncError(
                f"rotary: '{path}' multiplies by {self._factor:g}, and a trainer by {trainers:g}: this vLLM does not "
                "read all of the configuration's rope_parameters"
            )
        with torch.device("cpu"):  # where a trainer computes its frequencies
            self.inv_freq: Tensor = layer._compute_inv_freq(layer.scaling_factor if is_yarn else layer.base).float()
        self._compare()
        self._digest = self._table_digest()

    def is_of(self, layer: Any) -> bool:
        return layer is self._layer  # vLLM shares one between layers of the same settings

    def named(self) -> Mapping[str, Tensor]:
        return dict.fromkeys(self._names, self.inv_freq)

    def buffers(self) -> Iterator[Tensor]:
        return self._layer.buffers(recurse=False)

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        return self._path, self._layer.cos_sin_cache, lambda: self._digest

    def check_received(self, name: str, tensor: Tensor) -> None:
        if not _near(tensor, self.inv_freq):
            raise SyncError(
                f"rotary: '{name}' is not what this engine computes from its configuration (base {self._layer.base}): "
                "trainer and engine were given different rotary settings, and would compute different models"
            )

    def adopt(self, name: str, tensor: Tensor) -> None:
        theirs = tensor.detach().cpu().float()
        if not torch.equal(theirs, self.inv_freq):
            self.inv_freq = theirs.clone()
            self._layer.cos_sin_cache.copy_(self._table())
            self._digest = self._table_digest()

    def _table(self) -> Tensor:
        positions_P = torch.arange(self._layer.cos_sin_cache.shape[0], dtype=torch.float32)
        angles_PF = torch.outer(positions_P, self.inv_freq)
        return torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1) * self._factor

    def _compare(self) -> None:
        table, ours = self._layer.cos_sin_cache, self._table()
        if ours.shape != table.shape:
            raise SyncError(f"rotary: '{self._path}' has a table of {list(table.shape)}, not {list(ours.shape)}")
        # The served type rounds, and a large angle has few bits left after the point.
        slack = torch.finfo(table.dtype).eps + 4 * torch.finfo(torch.float32).eps * len(ours)
        gap = (table.detach().cpu().float() - ours).abs().max().item()
        if not gap <= slack:
            raise SyncError(f"rotary: the table of '{self._path}' is {gap:.2g} away from what its frequencies give")

    def _table_digest(self) -> int:
        return digest.piece(self._layer.cos_sin_cache, self._path)


class Constant:
    """A buffer that both compute by one formula, such as Gemma's scale of embeddings; or vLLM alone."""

    def __init__(self, path: str, buffer: Tensor, name: str = "") -> None:
        """`name`: the trainer's; empty: its module computes that number in its code."""
        self._path, self._buffer, self._name = path, buffer, name
        self._told = buffer.detach().cpu().float()
        """The trainer's, which the buffer may hold rounded."""
        self._digest = digest.piece(buffer, path)

    def named(self) -> Mapping[str, Tensor]:
        return {self._name: self._told} if self._name else {}

    def buffers(self) -> Iterator[Tensor]:
        return iter((self._buffer,))

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        return self._path, self._buffer, lambda: self._digest

    def check_received(self, name: str, tensor: Tensor) -> None:
        if not _near(tensor.to(self._buffer.dtype), self._buffer):
            raise SyncError(
                f"apply: '{name}' is not this engine's: it was started with other settings or another checkpoint than "
                "the trainer, and would compute another model"
            )

    def adopt(self, name: str, tensor: Tensor) -> None:
        theirs = tensor.detach().cpu().float()
        if not torch.equal(theirs, self._told):  # once: requests wait meanwhile
            self._told = theirs.clone()
            self._buffer.copy_(tensor)
            self._digest = digest.piece(self._buffer, self._path)


class OtherForm:
    """A trained tensor that vLLM keeps in another form: a Mamba layer's decay as `-exp(A_log)`; a gated delta net's
    `A_log` in float32, where the trainer has 16 bits."""

    def __init__(self, path: str, served: Tensor, name: str, dtype: torch.dtype, *, is_decay: bool) -> None:
        """`name`, `dtype`: the trainer's."""
        if served.dtype != torch.float32:
            raise SyncError(f"layout: '{path}' is kept in {served.dtype}; only float32 is known")
        if is_decay and not bool((served < 0).all()):
            raise SyncError(f"layout: '{path}' is not a negative decay: vLLM keeps it in a form that is not known")
        self._path, self._served, self._name, self._is_decay = path, served, name, is_decay
        self._told = (served.detach().neg().log() if is_decay else served.detach()).to(dtype, copy=True)
        """As it was received. Until then it is rounded, and no trainer's has its digest."""
        self._digest = digest.piece(served, path)

    def named(self) -> Mapping[str, Tensor]:
        return {self._name: self._told}

    def buffers(self) -> Iterator[Tensor]:
        return iter(())  # a parameter

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        return self._path, self._served, lambda: self._digest

    def check_received(self, name: str, tensor: Tensor) -> None:
        if not bool(self._form(tensor.detach()).isfinite().all()):
            what = "is too large or no number: the decay, its exponential," if self._is_decay else "has a value that"
            raise SyncError(f"apply: '{name}' {what} is not finite")

    def adopt(self, name: str, tensor: Tensor) -> None:
        self._told = tensor.detach().to(self._served.device, copy=True)
        formed = self._form(self._told)
        self._digest = digest.piece(formed, self._path)  # not of the served memory, which is read back later
        self._served.copy_(formed)

    def _form(self, told: Tensor) -> Tensor:
        return -told.float().exp() if self._is_decay else told.float()


def _yarn_factor(settings: Mapping[str, Any]) -> float:
    """Return what a trainer multiplies cosines and sines by: no tensor of it has that number."""
    if (told := settings.get("attention_factor")) is not None:
        return float(told)
    factor: float = settings.get("factor") or math.nan  # with which nothing agrees
    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    above, below = (above, below) if above and below else (1.0, 0.0)
    grown = math.log(max(factor, 1.0))
    return (0.1 * above * grown + 1.0) / (0.1 * below * grown + 1.0)


def _near(theirs: Tensor, ours: Tensor) -> bool:
    theirs, ours = theirs.detach().cpu().float(), ours.detach().cpu().float()
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=_NEAR, atol=0.0)
