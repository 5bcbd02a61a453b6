"""Turn groups into a Batch: credit, shared prompts, packing, micro-batches.

Siblings begin with the same prompt. If it is cheaper, a group becomes one tree: the prompt once, then each sibling's
own tokens as a branch that attends to the prompt and itself. Sequences and trees are packed, longest first, into rows
that are no longer than the longest of them. Rows of similar length share a micro-batch. A row with one plain sequence
needs no mask. Tokens of equal ids are one prompt only if they stand for equal images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.ops.byte_sizes import Shares
from tandem.ops.image_places import rotary_positions
from tandem.ops.packed_attention import pack
from tandem.ops.row_packing import common_prefix, first_fit, in_shares, micro_batches
from tandem.protocols import Algorithm
from tandem.types import (
    NO_VERSION,
    UNKNOWN_VERSION,
    Batch,
    Group,
    ImageRows,
    MicroBatch,
    PlacedImage,
    Totals,
    Trajectory,
)

_Code: TypeAlias = Literal["q", "f"]
_Array: TypeAlias = npt.NDArray[Any]
_TYPES: dict[_Code, Any] = {"q": np.int64, "f": np.float32}


@dataclass(frozen=True, slots=True)
class TrainSample:
    trajectory: Trajectory
    credit: list[float]
    """One value per trained token."""
    group: int
    """Number of its group in the step."""


@dataclass(slots=True)
class _RowItem:
    """Samples that stay together in a row and share their first `shared` tokens; 0 for one plain sample."""

    samples: list[TrainSample]
    shared: int = 0

    @property
    def length(self) -> int:
        return self.shared + sum(len(sample.trajectory.ids) - self.shared for sample in self.samples)


@dataclass(slots=True)
class _PackedRow:
    length: int = 0
    items: list[_RowItem] = field(default_factory=list[_RowItem])


def make_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    micro_tokens: int,
    version: int,
    shares: Shares,
    device: torch.device,
    multiple: int = 1,
) -> Batch:
    """Pack groups into a batch. A sample without any credit counts in the totals but is computed only if a KL term
    or a teacher needs it, or if the KL is estimated on it. `multiple`: the number of micro-batches is a multiple of
    this, if there are enough rows.
    """
    items: list[_RowItem] = []
    totals, credited, unknown = Totals(0, 0), 0, 0
    lags: list[int] = []
    mismatched: list[_RowItem] = []
    for number, (group, credits) in enumerate(zip(groups, algorithm.credit(groups), strict=True)):
        samples = [
            TrainSample(each, _said(each) or credit, number)
            for each, credit in zip(group, credits, strict=True)
            if credit
        ]
        totals = Totals(totals.tokens + sum(len(sample.credit) for sample in samples), totals.sequences + len(samples))
        for sample in samples:
            credited += len(sample.credit) - (sample.credit.count(0.0) if algorithm.credit_is_all else 0)
            lags += [version - v for v in sample.trajectory.versions if v >= 0]
            unknown += sample.trajectory.versions.count(UNKNOWN_VERSION)
        all_move = algorithm.needs_reference or not algorithm.credit_is_all
        moving = [sample for sample in samples if all_move or any(sample.credit)]
        items += _share_prompt(moving, shares, micro_tokens, together=algorithm.together)
        if algorithm.needs_kl:
            left_out = [each for each, credit in zip(group, credits, strict=True) if not credit]
            mismatched += [_RowItem([TrainSample(each, [0.0] * each.num_trained, number)]) for each in left_out]
    rows = _pack(items)
    metrics = {
        "tokens/trained": float(totals.tokens),
        "tokens/credited": float(credited),
        "tokens/computed": float(sum(row.length for row in rows)),
        "tokens/shared": float(sum(item.shared * (len(item.samples) - 1) for item in items)),
        **({"tokens/version_unknown": float(unknown)} if unknown else {}),
        **({"lag/max": float(max(lags)), "lag/mean": sum(lags) / len(lags)} if lags else {}),
    }
    parts = _split(rows, micro_tokens)
    if multiple > 1:
        parts = _split_in_multiples(rows, micro_tokens, len(parts), multiple)
    metrics["tokens/fullest_micro"] = float(max((sum(row.length for row in part) for part in parts), default=0))
    micro = [_to_tensors(part, device) for part in parts]
    tasks = [trajectory.task_id for group in groups for trajectory in group]
    measured = [_to_tensors(part, device) for part in _split(_pack(mismatched), micro_tokens)]
    return Batch(micro, totals, metrics, tasks, measured)


def _said(trajectory: Trajectory) -> list[float]:
    """Return the advantages that the environment gave for the trained tokens; empty if it gave none."""
    if not trajectory.advantages:
        return []
    return [value for value, trained in zip(trajectory.advantages, trajectory.trained, strict=True) if trained]


def plain_row(ids: Sequence[int], first: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch of one sequence, to score its tokens from `first` on."""
    count, total = len(ids) - first, len(ids)
    recording = Trajectory(list(ids), [i >= first for i in range(total)], [0.0] * total, [NO_VERSION] * total)
    return _to_tensors([_PackedRow(total, [_RowItem([TrainSample(recording, [0.0] * count, 0)])])], device)


def _share_prompt(samples: list[TrainSample], shares: Shares, micro_tokens: int, *, together: bool) -> list[_RowItem]:
    """Return the samples as one tree if that is cheaper, otherwise one by one."""
    alone = [_RowItem(samples)] if together and samples else [_RowItem([sample]) for sample in samples]
    if len(samples) < 2:
        return alone
    trajectories = [sample.trajectory for sample in samples]
    first_trained = min(trajectory.trained.index(True) for trajectory in trajectories)
    prefix = common_prefix([trajectory.ids[:first_trained] for trajectory in trajectories])
    tree = _RowItem(samples, _without_other_images(prefix, [trajectory.images for trajectory in trajectories]))
    cheaper = shares([item.length for item in alone], tree.length)
    return [tree] if cheaper and tree.length <= micro_tokens else alone


def _without_other_images(prefix: int, images: Iterable[Sequence[PlacedImage]]) -> int:
    """Cut a common prefix before the first image that is not in all sequences. An equal image is never cut: none of its
    tokens is trained."""
    for each in zip_longest(*images):
        begins = min(image.offset for image in each if image is not None)
        if begins >= prefix:
            break
        if each[0] is None or each.count(each[0]) < len(each):
            return begins
    return prefix


def _pack(items: Sequence[_RowItem]) -> list[_PackedRow]:
    rows = ([items[index] for index in row] for row in first_fit([item.length for item in items]))
    return [_PackedRow(sum(item.length for item in row), row) for row in rows]


def _split(rows: list[_PackedRow], micro_tokens: int) -> list[list[_PackedRow]]:
    parts = micro_batches([row.length for row in rows], micro_tokens)
    return [[rows[index] for index in part] for part in parts]


def _split_in_multiples(
    rows: list[_PackedRow], micro_tokens: int, at_least: int, multiple: int
) -> list[list[_PackedRow]]:
    items, parts = in_shares([row.items for row in rows], lambda item: item.length, micro_tokens, at_least, multiple)
    rows = [_PackedRow(sum(item.length for item in row), list(row)) for row in items]
    return [[rows[index] for index in part] for part in parts]


class _Columns:
    """The pieces that become the tensors of a MicroBatch. Arrays, since Python takes a microsecond for each token."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = 0
        self.ids, self.positions, self.segments, self.parents = (_Pieces("q") for _ in range(4))
        self.source, self.target, self.versions, self.sequences = (_Pieces("q") for _ in range(4))
        self.credit, self.behaviour, self.lengths, self.reference = (_Pieces("f") for _ in range(4))
        self.groups: list[int] = []
        self.stretches: list[tuple[Sequence[PlacedImage] | None, int, int]] = []
        """What rows have, one behind the other: the images of a sequence, and its part, from and to; None: padding."""
        self.places: list[Tensor] = []
        self.digests: list[str] = []

    def add_row(self, row: _PackedRow) -> None:
        self._filled = segment = 0
        for item in row.items:
            trunk = segment
            if item.shared:
                self._add_tokens(item.samples[0].trajectory, 0, item.shared, trunk, trunk)
                segment += 1
            trunk_end = self._filled - 1
            for sample in item.samples:
                self._add_sample(sample, item.shared, trunk_end, segment, trunk if item.shared else segment)
                segment += 1
        padding = self.width - self._filled
        for pieces, value in ((self.ids, 0), (self.positions, 0), (self.segments, -1), (self.parents, -1)):
            pieces.repeat(value, padding)
        self.stretches.append((None, 0, padding))
        self.rows += 1

    def _add_sample(self, sample: TrainSample, shared: int, trunk_end: int, segment: int, parent: int) -> None:
        trajectory, row_start = sample.trajectory, self.rows * self.width
        assert shared or not trajectory.trained[0], "the first token of a sequence has no context and cannot be trained"
        trained = np.array(trajectory.trained[shared:], dtype=np.bool_)
        target = np.flatnonzero(trained) + (row_start + self._filled)
        source = target - 1
        if shared and len(trained) and trained[0]:
            source[0] = row_start + trunk_end
        self.target.add(target)
        self.source.add(source)
        self.behaviour.add(_array(trajectory.logprobs[shared:], "f")[trained])
        self.versions.add(_array(trajectory.versions[shared:], "q")[trained])
        if trajectory.teacher_logprobs:
            self.reference.add(_array(trajectory.teacher_logprobs[shared:], "f")[trained])
        self.credit.add(_array(sample.credit, "f"))
        self.lengths.repeat(len(sample.credit), len(sample.credit))
        self.sequences.repeat(len(self.groups), len(sample.credit))
        self.groups.append(sample.group)
        self._add_tokens(trajectory, shared, len(trajectory.ids), segment, parent)

    def _add_tokens(self, trajectory: Trajectory, start: int, stop: int, segment: int, parent: int) -> None:
        self.ids.add(_array(trajectory.ids[start:stop], "q"))
        self.positions.add(np.arange(start, stop))
        self.segments.repeat(segment, stop - start)
        self.parents.repeat(parent, stop - start)
        self._add_images(trajectory, start, stop)
        self._filled += stop - start

    def _add_images(self, trajectory: Trajectory, start: int, stop: int) -> None:
        self.stretches.append((trajectory.images, start, stop))
        shift = self.rows * self.width + self._filled - start
        for image in trajectory.images:
            if start <= image.offset < stop:
                assert image.end <= stop, "an image is cut in two"
                self.places.append(torch.arange(image.offset, image.end) + shift)
                self.digests.append(image.digest)

    def images(self, device: torch.device) -> ImageRows | None:
        """Return the images of the rows; None if there are none."""
        if not self.digests:
            return None
        rotary_3BT = torch.cat([_rotary(*each) for each in self.stretches], 1).view(3, self.rows, self.width)
        return ImageRows(rotary_3BT.to(device), torch.cat(self.places).to(device), self.digests)


def _rotary(images: Sequence[PlacedImage] | None, start: int, stop: int) -> Tensor:
    if images is None:
        return torch.zeros(3, stop - start, dtype=torch.long)
    merge = images[0].merge if images else 1
    return rotary_positions(stop, images, merge)[0][:, start:]


class _Pieces:
    """Arrays of one type, to be joined."""

    def __init__(self, code: _Code) -> None:
        self._code: _Code = code
        self._arrays: list[_Array] = []

    def add(self, values: _Array) -> None:
        self._arrays.append(values)

    def repeat(self, value: float, times: int) -> None:
        self._arrays.append(np.full(times, value, _TYPES[self._code]))

    def tensor(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, _TYPES[self._code]), *self._arrays]))


def _array(values: Sequence[float], code: _Code) -> _Array:
    return np.array(values, dtype=_TYPES[code])


def _to_tensors(rows: list[_PackedRow], device: torch.device) -> MicroBatch:
    columns = _Columns(max(row.length for row in rows))
    for row in rows:
        columns.add_row(row)

    def on_device(pieces: _Pieces) -> Tensor:
        return pieces.tensor().to(device)

    def by_rows(pieces: _Pieces) -> Tensor:
        return pieces.tensor().view(len(rows), columns.width)

    segments_BT, parents_BT = by_rows(columns.segments), by_rows(columns.parents)
    reference_N = on_device(columns.reference)
    return MicroBatch(
        by_rows(columns.ids).to(device),
        by_rows(columns.positions).to(device),
        segments_BT.to(device),
        parents_BT.to(device),
        pack(segments_BT, parents_BT, device),
        on_device(columns.source),
        on_device(columns.target),
        on_device(columns.credit),
        on_device(columns.behaviour),
        on_device(columns.versions),
        on_device(columns.lengths),
        on_device(columns.sequences),
        torch.tensor(columns.groups).to(device),
        reference_N if len(reference_N) else None,
        images=columns.images(device),
    )
