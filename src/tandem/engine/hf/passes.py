"""The passes of the embedded engine's model: the prompts of new requests, or one token for every live row.

Here is what lies on the device: the kv cache, what is known of each row, and adapters. Live rows are first, in the
order of the requests that run.

Shapes: S rows, V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.admission_queue import QueuedRequest
from tandem.engine.hf.cache_room import CacheRoom
from tandem.engine.hf.decode_steps import DecodeSteps, logits_with_masks
from tandem.engine.hf.mixed_adapters import MixedAdapters
from tandem.engine.hf.prefill_batch import PrefillBatch
from tandem.engine.hf.prompt_graphs import PromptGraphs
from tandem.engine.hf.row_state import RowState
from tandem.ops import attention_masks
from tandem.ops.lm_head import Head
from tandem.ops.row_packing import micro_batches


def most_padding(device_kind: str, parameters: int) -> int:
    """Return the most positions of padding in a pass of a hybrid's prompts: another pass takes as long.

    On a CPU 32. On a GPU a pass of few positions is all launches, which take as long as 6,000 positions of a small
    model; a large one computes each position for longer, so there it is 1e13 divided by the parameters. Measured:
    docs/PERFORMANCE.md, by benchmarks/gpu/prefill_passes.py.
    """
    return 32 if device_kind == "cpu" else min(6000, int(1e13 / parameters))


class Passes:
    def __init__(
        self, module: Any, head: Head, room: CacheRoom, device: torch.device, *, most_positions: int, eager: bool
    ) -> None:
        """`most_positions`: that the model has numbers for. `eager`: decode steps have masks, and no pass is a CUDA
        graph."""
        self._head, self._room, self._device = head, room, device
        layers: int = module.config.get_text_config().num_hidden_layers
        parameters = sum(each.numel() for each in module.parameters())
        self._most_padding = 0 if room.why_apart else most_padding(device.type, parameters)
        rows = room.max_running + 1  # the last row is for an urgent request
        self.cache, self.state, self.adapters = room.cache(layers), RowState(rows, device), MixedAdapters(module, rows)
        self.steps: DecodeSteps | None = None
        """Decode steps without masks; None: `eager`."""
        self.prompts: PromptGraphs | None = None
        """Prompts that come alone; None: `eager`."""
        if not eager:
            self.steps = DecodeSteps(module, head, self.cache, self.state, room.cache(layers))
            self.prompts = PromptGraphs(
                head, self.cache, self.state, room, layers=layers, most_positions=most_positions
            )

    @property
    def report(self) -> dict[str, Any]:
        """Of each option, whether it is engaged."""
        passes = {"graphs": self.steps, "prompt_graphs": self.prompts}
        return {name: each.report for name, each in passes.items() if each} | self._room.report

    def weights_at(self, addresses: Sequence[int]) -> None:
        """The weights of the next passes are there."""
        for each in (self.steps, self.prompts):
            if each is not None:
                each.graphs.weights_at(addresses)

    def prefill(self, wave: list[QueuedRequest], running: Sequence[QueuedRequest]) -> Tensor:
        """Put requests into the rows behind those that run. Sort them, and return the logits after each one's
        prompt."""
        first = self.cache.num_rows = len(running)
        longest = _longest(running)
        width = 0 if self.prompts is None else self.prompts.width_for(wave)
        # The cache doubles at the widths, so one position more than is needed would move it, and drop its graphs.
        alone = max(width, wave[0].length + 1, longest)
        if width and (first + 1) * alone <= self._room.positions:
            self.cache.reserve(first + 1, alone)
            logits_SV = self._alone(wave[0], width)
        else:
            groups = self._groups(wave)
            wave[:] = [request for group in groups for request in group]
            self.cache.reserve(first + len(wave), max(*(request.length + 1 for request in wave), longest))
            found = [self._together(group) for group in groups]
            logits_SV = found[0] if len(found) == 1 else torch.cat(found)
        self.cache.num_rows = first + len(wave)
        return logits_SV

    def _groups(self, wave: Sequence[QueuedRequest]) -> list[list[QueuedRequest]]:
        """Return which requests share a pass: all, or of a hybrid, whose padding is computed, those of near lengths."""
        groups = [[*wave]]
        if self._room.has_states:
            prompts = list({request.begun: None for request in wave})  # equal ones are computed once
            lengths = [len(prompt.ids) for prompt in prompts]
            parts = micro_batches(lengths, self._room.positions, self._most_padding)
            place = {prompts[index]: number for number, part in enumerate(parts) for index in part}
            groups = [[request for request in wave if place[request.begun] == number] for number in range(len(parts))]
        return [sorted(group, key=lambda request: self.adapters.place(request.adapter)) for group in groups]

    def _together(self, wave: list[QueuedRequest]) -> Tensor:
        batch = PrefillBatch(wave, self._device, end_together=self._room.has_states)
        self.adapters.plan(batch.adapters, batch.width)
        logits_SV = batch.logits(self._head, self.cache, self.state)
        self.cache.num_rows += len(wave)
        return logits_SV

    def _alone(self, request: QueuedRequest, width: int) -> Tensor:
        assert self.prompts is not None
        row, moved = self.cache.num_rows, self.adapters.moved if request.adapter else 0
        is_graph = self.adapters.plan([request.adapter], width)
        return self.prompts.run(row, request, width, adapters=moved, by_launches=not is_graph)

    def decode(self, running: Sequence[QueuedRequest]) -> Tensor:
        """Return the logits after the newest token of each row."""
        rows, adapters, longest = len(running), [request.adapter for request in running], _longest(running)
        steps = None if self.steps is None or self.steps.why_masked else self.steps
        filled = rows if steps is None else steps.rows_for(rows)
        if filled * longest > self._room.positions:
            filled = rows
        self.state.position_S[rows:filled] = 0
        self.cache.reserve(filled, longest)
        is_graph = self.adapters.plan([*adapters, *[""] * (filled - rows)], 1)
        if steps is None:
            logits_SV = logits_with_masks(self._head, self.cache, self.state, rows, longest)
        else:
            moved = self.adapters.moved if any(adapters) else 0
            logits_SV = steps.run(filled, adapters=moved, by_launches=not is_graph)[:rows]
            self.cache.num_rows = rows
        self.state.position_S[:rows] += 1
        return logits_SV

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        """Return the logprob of each id but the first, by the base."""
        self.adapters.plan([""], 1)
        ids_1T = torch.tensor([ids[:-1]], device=self._device, dtype=torch.long)
        positions_T = torch.arange(ids_1T.shape[1], device=self._device)
        mask = attention_masks.of_prompts(self._head.config, positions_T)
        hidden_1TH = self._head.hidden(ids_1T, positions_T[None], mask)
        return self._head.logprobs(hidden_1TH[0], torch.tensor(ids[1:], device=self._device), 1.0)[0].tolist()

    def move(self, sources: Sequence[int], targets: Sequence[int], left: int) -> None:
        """Move rows into the gaps that ended rows left; `left` are live."""
        if sources:
            source_S, target_S = torch.tensor([[*sources], [*targets]], device=self._device)
            self.state.move(source_S, target_S)
            self.cache.move(source_S, target_S)
        self.cache.num_rows = left


def _longest(running: Sequence[QueuedRequest]) -> int:
    return max((request.length for request in running), default=0)
