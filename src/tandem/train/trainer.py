"""Turns a Batch into a new version of the weights."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.errors import LogprobGap, NonFinite
from tandem.io import atomic
from tandem.protocols import Algorithm, Policy
from tandem.types import Batch, Metrics, MicroBatch, TokenLogprobs, Weights

_log = logging.getLogger(__name__)

_BAD_STEPS_IN_A_ROW = 3


class PolicyTrainer:
    """`lr(step)` counts the steps of this stage from 0; `version` counts the steps of the whole run."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: torch.optim.Optimizer,
        *,
        lr: Callable[[int], float],
        clip_norm: float,
        version: int = 0,
        temperature: float = 1.0,
        max_logprob_gap: float = math.inf,
    ) -> None:
        self.version = version
        self.set_aside: list[list[str]] = []
        """Task ids of batches whose loss or gradient was not finite; the weights never saw them."""
        self._first_version = version
        self._policy, self._algorithm, self._optimizer = policy, algorithm, optimizer
        self._lr, self._clip_norm, self._temperature, self._max_gap = lr, clip_norm, temperature, max_logprob_gap
        self._bad_in_a_row = 0

    def step(self, batch: Batch) -> Metrics:
        lr = self._lr(self.version - self._first_version)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self._forward_backward(batch)
        parameters = [tensor for _, tensor in self._policy.trainable()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm).item()
        if not (math.isfinite(norm) and math.isfinite(metrics["loss/total"])):
            return self._set_aside(batch, norm, metrics["loss/total"])
        self._optimizer.step()
        self._bad_in_a_row = 0
        self.version += 1
        return {**batch.metrics, **metrics, "grad/norm": norm, "lr": lr, "train/set_aside": 0.0}

    def export(self) -> Weights:
        return self._policy.weights(self.version)

    def save(self, path: Path) -> None:
        """Weights, optimizer and clock, all by parameter name."""
        names = {id(tensor): name for name, tensor in self._policy.trainable()}
        state = {
            f"{names[id(tensor)]}|{key}": value.detach().cpu().contiguous()
            for tensor, slots in self._optimizer.state.items()
            for key, value in slots.items()
        }
        with atomic.directory(path) as directory:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in self._policy.trainable()},
                directory / "weights.safetensors",
            )
            save_file(state, directory / "optimizer.safetensors")
            (directory / "trainer.json").write_text(
                json.dumps({"version": self.version, "first_version": self._first_version})
            )

    def load(self, path: Path) -> None:
        clock = json.loads((path / "trainer.json").read_text())
        saved, state = load_file(path / "weights.safetensors"), load_file(path / "optimizer.safetensors")
        slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            name, _, slot = key.partition("|")
            slots[name][slot] = value
        self._optimizer.state.clear()  # moments of another past, if there are any
        with torch.no_grad():
            for name, tensor in self._policy.trainable():
                tensor.copy_(saved[name])
                if name in slots:
                    # Fused optimizers want the step count beside the weights too.
                    self._optimizer.state[tensor] = {
                        slot: value.to(tensor.device) for slot, value in slots[name].items()
                    }
        self.version, self._first_version = clock["version"], clock["first_version"]

    def _forward_backward(self, batch: Batch) -> Metrics:
        sums: defaultdict[str, float] = defaultdict(float, {"loss/total": 0.0})
        gap = _Gap()
        computed = sum(len(micro.target_N) for micro in batch.micro)
        for micro in batch.micro:
            if self._algorithm.needs_reference:
                micro.reference_N = self._policy.reference_logprobs(micro, self._temperature)
            scored = self._policy.logprobs(micro, self._temperature)
            gap.add(scored, micro, self.version)
            loss, token_sums = self._algorithm.loss(scored, micro, batch.totals)
            loss.backward()
            sums["loss/total"] += loss.item()
            for name, value in token_sums.items():
                sums[name] += value / computed
        return {**sums, **gap.metrics(self._max_gap)}

    def _set_aside(self, batch: Batch, norm: float, loss: float) -> Metrics:
        self._optimizer.zero_grad(set_to_none=True)
        self.set_aside.append(batch.task_ids)
        self._bad_in_a_row += 1
        _log.warning(
            "version %d: loss %s, gradient norm %s: the batch is set aside, the weights are as before; its tasks: %s",
            self.version,
            loss,
            norm,
            ", ".join(dict.fromkeys(batch.task_ids)),
        )
        if self._bad_in_a_row >= _BAD_STEPS_IN_A_ROW:
            raise NonFinite(
                f"train: {self._bad_in_a_row} batches in a row gave a loss or gradient that is not finite (the last: "
                f"loss {loss}, norm {norm}); lower train.lr or look at the rewards of tasks "
                f"{', '.join(sorted(set(batch.task_ids))[:5])}"
            )
        return {**batch.metrics, "train/set_aside": 1.0}


class _Gap:
    """How far engine and trainer are apart about the same tokens: of the current version; older ones may differ."""

    def __init__(self) -> None:
        self._sum, self._max, self._count = 0.0, 0.0, 0

    def add(self, scored: TokenLogprobs, micro: MicroBatch, version: int) -> None:
        current_N = micro.versions_N == version
        if bool(current_N.any()):
            gap_N = (scored.logprobs_N.detach() - micro.behaviour_N)[current_N].abs()
            self._sum += gap_N.sum().item()
            self._max = max(self._max, gap_N.max().item())
            self._count += int(current_N.sum())

    def metrics(self, limit: float) -> Metrics:
        if not self._count:
            return {}
        mean = self._sum / self._count
        if mean > limit:
            raise LogprobGap(
                f"sync: trainer and engine differ by {mean:.4f} nats a token (at most {self._max:.4f}) about tokens of "
                f"the very same version, and train.max_logprob_gap = {limit:g}: the engine serves other weights than "
                "the trainer's, or samples from another distribution than it reports"
            )
        return {"sync/logprob_gap": mean, "sync/logprob_gap_max": self._max}
