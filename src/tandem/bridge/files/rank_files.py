"""A version as files of which every rank of the trainer writes its rows.

    rank 0                                        ranks 1 to N-1
    begins the files: headers and sizes
    where they are                             -> read the headers
    what it holds, with the digests           <-> what they hold, with the digests
    writes what no rank before it holds           write what no rank before them holds
                                              <-  done, or what failed

A rank that fails says so in its place, so all ranks give up the version together and go on training.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from tandem.bridge.common.held_weights import Held, HeldWeights, StaleRanks, fingerprints
from tandem.bridge.common.manifest import dtype_named
from tandem.bridge.common.packer import Form
from tandem.bridge.common.places import TensorPlace, check_held, holders, place_of, sizes_of
from tandem.errors import SyncError
from tandem.io import row_file
from tandem.io.rank_answers import tried, what_failed
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Part, Weights

_FILES = ("*.safetensors", "*.tandem")


class Ranks(Protocol):
    """What this needs of train/crew.py."""

    rank: int

    def gather(self, value: Any) -> list[Any]: ...
    def tick(self) -> None: ...


class RankFiles:
    """One rank's end; all ranks call `write` for the same versions."""

    def __init__(self, ranks: Ranks, mode: str, row_shards: int) -> None:
        """`row_shards`: into how many runs of rows each tensor is cut."""
        self._ranks, self._mode, self._row_shards = ranks, mode, row_shards
        self._stale = StaleRanks(mode)
        self._begun = False

    @contextmanager
    def telling(self) -> Generator[None]:
        """Rank 0: wrap all that makes a version. What fails before `write` is told to the ranks that wait there."""
        self._begun = False
        try:
            yield
        except Exception as error:
            if not self._begun:
                self._ranks.gather({"error": f"{error}"})
            raise

    def write(
        self,
        weights: Weights,
        phases: Phases,
        directory: Path | None = None,
        still_wanted: Callable[[], None] = lambda: None,
    ) -> Fingerprints:
        """Write this rank's part of a version. Rank 0 gives the directory, whose files have their headers, and gets the
        fingerprints of whole tensors. `still_wanted` raises if the caller has given up. SyncError: the version is not
        written, on any rank."""
        what = f"{self._mode}: version {weights.version}"
        self._begun = True
        (home,) = _all_well(self._ranks.gather({"value": str(directory or "")})[:1], what)
        weights = self._ticking(weights, still_wanted)
        files: dict[Path, dict[str, Form]] = {}
        forms: dict[str, Form] = {}

        def stated() -> Mapping[str, Any]:
            files.update(_layouts(Path(home)))
            forms.update(sorted(chain.from_iterable(layout.items() for layout in files.values())))
            return HeldWeights(weights, forms, self._mode).digest([], phases).to_json(forms)

        answers = _all_well(self._ranks.gather(tried(stated)), what)
        held = [Held.from_json(each, forms) for each in answers]
        done = tried(lambda: self._write(files, weights, held, forms))
        _all_well(self._ranks.gather(done), what)
        phases.end("move")
        return done["value"]

    def _proven(self, held: Sequence[Held], forms: Mapping[str, Form], version: int) -> Fingerprints:
        sizes = sizes_of(forms)
        try:
            check_held(sizes, [each.places for each in held], self._row_shards)
        except SyncError as error:
            raise SyncError(f"{self._mode}: version {version} was not sent: {error}") from error
        numbers = fingerprints(forms, held, version, self._mode)
        self._stale.check(held, version, sizes)
        return numbers

    def _write(
        self,
        files: Mapping[Path, Mapping[str, Form]],
        weights: Weights,
        held: Sequence[Held],
        forms: Mapping[str, Form],
    ) -> Fingerprints:
        rank = self._ranks.rank
        numbers = {} if rank else self._proven(held, forms, weights.version)
        own = {place for place, ranks in holders([each.places for each in held]).items() if ranks[0] == rank}
        for path, names in files.items():
            row_file.write_parts(path, _served(weights, forms, names, own), durable=False)
        return numbers

    def _ticking(self, weights: Weights, still_wanted: Callable[[], None]) -> Weights:
        """Return the same weights. Each part is a sign of progress: a large model takes longer than a rank may be
        silent."""

        def parts() -> Iterator[Part]:
            for part in weights.parts():
                self._ranks.tick()
                still_wanted()
                yield part

        return Weights(weights.version, weights.kind, weights.tensors, rows=parts)


def _served(
    weights: Weights, forms: Mapping[str, Form], names: Container[str], own: Set[TensorPlace]
) -> Iterator[Part]:
    """Yield the parts of these tensors that are this rank's to write, in the type that engines serve."""
    for part in weights.parts():
        if part.name in names and part.tensor.numel() and place_of(part) in own:
            yield part._replace(tensor=part.tensor.detach().to(dtype_named(forms[part.name].dtype)))


def _layouts(directory: Path) -> dict[Path, dict[str, Form]]:
    """Return the tensors of each file."""
    found: dict[Path, dict[str, Form]] = {}
    for path in sorted(path for pattern in _FILES for path in directory.glob(pattern)):
        with row_file.opened(path) as file:
            found[path] = {name: Form(stored.dtype, tuple(stored.shape)) for name, stored in file.tensors.items()}
    if not found:
        raise SyncError(f"{directory}: its files are not seen here; set sync.directory to one that all hosts share")
    return found


def _all_well(answers: list[dict[str, Any]], what: str) -> list[Any]:
    if failed := what_failed(answers):
        raise SyncError(f"{what} was not written: {failed}; the version before stays")
    return [answer["value"] for answer in answers]
