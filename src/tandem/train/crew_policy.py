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

from tandem.errors import CheckpointError
from tandem.train import micro_wire
from tandem.train.crew import Crew
from tandem.types import MicroBatch, TokenLogprobs


class CrewPolicy:
    def __init__(self, crew: Crew, inner: Any) -> None:
        """`inner`: the policy of this rank's rows."""
        self.inner = inner
        self._crew = crew
        self._micro: Tensor | None = None
        self._trained: dict[str, Tensor] = {}
        for name, handler in {
            "policy.scored": self._do_scored, "policy.keep_reference": inner.keep_reference,
            "policy.drop_reference": inner.drop_reference, "policy.export": self._do_export,
            "policy.trained": self._do_trained, "policy.load_trained": self._do_load_trained,
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
        self._crew.order("policy.export", path=str(path))

    def whole_trained(self) -> dict[str, Tensor]:
        """All that is trained, whole, on this host."""
        self._crew.order("policy.trained")
        found, self._trained = self._trained, {}
        return found

    def load_trained(self, directory: Path) -> None:
        self._crew.order("policy.load_trained", path=str(directory / "weights.safetensors"))

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
        self.inner.export(Path(path))

    def _do_trained(self) -> None:
        self._trained = self._crew.gather_parts(self.inner.trained_parts())

    @torch.no_grad()
    def _do_load_trained(self, path: str) -> None:
        from safetensors import safe_open

        shapes = self.inner.full_shapes()
        starts = {part.name: part.row_start for part in self.inner.trained_parts()}
        with safe_open(path, "pt") as file:
            for name, tensor in self.inner.trainable():
                there = file.get_slice(name)
                if tuple(there.get_shape()) != shapes[name]:
                    raise CheckpointError(
                        f"{path}: the saved weights belong to another model: '{name}' differs in shape"
                    )
                start = starts.get(name, 0)
                tensor.copy_(there[start : start + len(tensor)])
        self.inner.settle()
