"""A policy of a crew as the recipes of rank 0 see it: each call is an order, which all ranks do.

Every rank builds one around its own rows. What is read without a collective (shapes, names, the tokenizer) is the inner
policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.io import row_file
from tandem.train import micro_wire
from tandem.train.crew import Crew
from tandem.train.row_save import FileParts, write_as_made, write_together
from tandem.types import MicroBatch, Part, TokenLogprobs

_TRAINED = "weights.safetensors"


class CrewPolicy:
    def __init__(self, crew: Crew, inner: Any) -> None:
        """`inner`: the policy of this rank's rows."""
        self.inner = inner
        self._crew = crew
        self._micro: Tensor | None = None
        for name, handler in {
            "policy.scored": self._do_scored, "policy.keep_reference": inner.keep_reference,
            "policy.drop_reference": inner.drop_reference, "policy.export": self._do_export,
            "policy.write_trained": self._do_write_trained, "policy.load_trained": self._do_load_trained,
        }.items():  # fmt: skip
            crew.handle(name, handler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor:
        return self._scored(micro, temperature, top_p, reference=False).logprobs_N

    def logprobs(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> TokenLogprobs:
        assert not torch.is_grad_enabled(), "the trainer alone computes gradients"
        return self._scored(micro, temperature, top_p, reference=False)

    def reference_logprobs(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor:
        return self._scored(micro, temperature, top_p, reference=True).logprobs_N

    def keep_reference(self) -> None:
        self._crew.order("policy.keep_reference")

    def drop_reference(self) -> None:
        self._crew.order("policy.drop_reference")

    def export(self, path: Path) -> None:
        self._crew.order("policy.export", path=str(path.absolute()))

    def write_trained(self, directory: Path) -> None:
        """All that is trained, in a file that `load_trained` reads."""
        self._crew.order("policy.write_trained", path=str(directory.absolute()))

    def load_trained(self, directory: Path) -> None:
        self._crew.order("policy.load_trained", path=str(directory.absolute() / _TRAINED))

    def follow(self, teacher: Any) -> None:
        self.inner.follow(teacher)

    def deployer(self) -> Callable[..., None]:
        return self.inner.deployer()

    def _scored(self, micro: MicroBatch, temperature: float, top_p: float, *, reference: bool) -> TokenLogprobs:
        self._micro = micro_wire.pack([micro])
        what = {"size": self._micro.numel(), "temperature": temperature, "top_p": top_p, "reference": reference}
        return self._crew.order("policy.scored", **what)[0]

    def _do_scored(self, size: int, temperature: float, top_p: float, *, reference: bool) -> TokenLogprobs | None:
        data, self._micro = self._crew.share(self._micro, size), None
        (micro,) = micro_wire.unpack(data, self._crew.device)
        assert micro is not None
        if reference:
            logprobs_N = self.inner.reference_logprobs(micro, temperature, top_p)
            scored = TokenLogprobs(logprobs_N, torch.zeros_like(logprobs_N))
        else:
            scored = self.inner.scored_apart(micro, temperature, top_p)
        return scored if self._crew.rank == 0 else None

    def _do_export(self, path: str) -> None:
        if self.inner.rows.held_by_all:
            write_as_made(self._crew, Path(path), self.inner.merged_export())
            return
        deployer = self.inner.row_deployer()
        parts = deployer.files(self.inner.written_parts(), self._crew.rank)
        write_together(
            self._crew, Path(path), {file: FileParts(those, {"format": "pt"}) for file, those in parts.items()}
        )
        if self._crew.rank == 0:
            deployer.write_companions(Path(path))

    def _do_write_trained(self, path: str) -> None:
        write_together(self._crew, Path(path), {_TRAINED: FileParts(self.inner.written_parts())})

    @torch.no_grad()
    def _do_load_trained(self, path: str) -> None:
        shapes = self.inner.full_shapes()
        starts = {part.name: (part.row_start, part.col_start) for part in self.inner.trained_parts()}
        with row_file.opened(Path(path)) as file:
            parts = [
                Part(name, tensor, *starts.get(name, (0, 0)), shapes[name]) for name, tensor in self.inner.trainable()
            ]
            for part in parts:
                file.check(part)
            for part in parts:
                file.read_part(part)
        self.inner.settle()
