"""Versions on the disk: a tree that anything can be made from again, to the bit, or is refused by name."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import sealed_directory
from tandem.online.version_store import VersionStore
from tandem.online.weight_deltas import HeldVersion

Tensors = dict[str, Tensor]


def start() -> Tensors:
    torch.manual_seed(0)
    return {"w": (torch.randn(64, 64) * 0.02).to(torch.bfloat16), "n": torch.ones(16)}


def state(version: int) -> Tensors:
    return {"w|exp_avg": torch.full((4,), float(version)), "w|master": torch.arange(6, dtype=torch.int16)}


class Rig:
    """A store with a live model, of which every version's bits are remembered."""

    def __init__(self, directory: Path, **options: int | float) -> None:
        self.store = VersionStore(directory, **options)  # pyright: ignore[reportArgumentType]
        self.live = start()
        self.bits: dict[int, Tensors] = {0: self._copy()}
        self.store.anchor(0, self.live, state(0), {"made_of": "preset"})
        self.held = HeldVersion.copy_of(0, self.live)

    def train(self, version: int, anchor: bool = False) -> None:
        """From whatever `held` is, with all kinds of changes."""
        rng = torch.Generator().manual_seed(version)
        self.held.restore(self.live)
        self.live["w"].view(torch.int16).add_((torch.rand(64, 64, generator=rng) < 0.03).to(torch.int16))
        self.live["n"] += torch.randn(16, generator=rng) * 1e-3
        self.store.update(version, self.held, self.live, {"job": f"j{version}"})
        self.bits[version] = self._copy()
        if anchor:
            self.store.anchor(version, self.live, state(version))

    def _copy(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self.live.items()}

    def is_at(self, held: HeldVersion, version: int) -> bool:
        return held.version == version and all(torch.equal(held.tensors[n], t) for n, t in self.bits[version].items())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """0 - 1 - 2 - 3* - 4 - 5; 2 - 6 - 7: went back to 2 and trained on; 3 is anchored."""
    rig = Rig(tmp_path / "versions")
    for version in range(1, 6):
        rig.train(version, anchor=version == 3)
    rig.store.move(rig.held, 2)
    rig.train(6)
    rig.train(7)
    return rig


def damage(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def test_every_version_is_made_again_in_another_process_s_store_to_the_bit(rig: Rig):
    other = VersionStore(rig.store.directory)
    for version in rig.bits:
        loaded = other.load(version)
        assert rig.is_at(loaded.held, version)
        assert loaded.held.digests == HeldVersion.of(version, rig.bits[version]).digests
        anchor = 3 if version in (3, 4, 5) else 0
        assert loaded.state_version == anchor
        assert loaded.state is not None
        assert all(torch.equal(loaded.state[name], tensor) for name, tensor in state(anchor).items())
    assert other.load(0).notes == {"made_of": "preset"}


def test_the_optimizer_of_a_version_is_that_of_the_anchor_behind_it_whatever_became_of_the_weights(rig: Rig):
    for version in rig.bits:
        found = rig.store.state_of(version)
        assert found is not None
        assert found[1] == (3 if version in (3, 4, 5) else 0)
        assert all(torch.equal(found[0][name], tensor) for name, tensor in state(found[1]).items())
    directory = rig.store.directory
    damage(directory / "anchor-000003" / "weights.safetensors")
    damage(directory / "update-000005-from-000004" / "update.safetensors")
    with pytest.raises(CheckpointDamaged):
        rig.store.load(5)  # it finds out
    assert (rig.store.state_of(5) or ({}, -1))[1] == 3
    damage(directory / "anchor-000003" / "state.safetensors")
    assert (rig.store.state_of(5) or ({}, -1))[1] == 0
    assert "state.safetensors" in rig.store.without_state["anchor-000003"]
    damage(directory / "anchor-000000" / "state.safetensors")
    assert rig.store.state_of(5) is None


def test_weights_beside_a_damaged_optimizer_are_as_good_as_any(rig: Rig):
    directory = rig.store.directory
    for anchor in ("anchor-000000", "anchor-000003"):
        damage(directory / anchor / "state.safetensors")
    store = VersionStore(directory)
    loaded, reasons = store.whole(5)
    assert rig.is_at(loaded.held, 5)
    assert (loaded.state, store.known().keys()) == (None, rig.bits.keys())
    assert any("anchor-000003 has no optimizer state any more: " in reason for reason in reasons)
    store.forget({5, 7})
    assert all(rig.is_at(VersionStore(directory).load(version).held, version) for version in (5, 7))


def test_what_was_written_in_another_format_is_neither_damaged_nor_passed_over(rig: Rig):
    path = rig.store.directory / "update-000005-from-000004"
    head = json.loads((path / "version.json").read_text())
    planes = (path / "update.safetensors").read_bytes()
    sealed_directory.remove(path)
    with sealed_directory.sealed(path) as directory:
        (directory / "update.safetensors").write_bytes(planes)
        (directory / "version.json").write_text(json.dumps({**head, "format": 1}))
    store = VersionStore(rig.store.directory)
    with pytest.raises(CheckpointError, match="update 5 is of format 1") as refused:
        store.whole(5)
    assert not isinstance(refused.value, CheckpointDamaged)
    held = store.load(4).held
    with pytest.raises(CheckpointError, match="use the release that wrote it"):
        store.move(held, 5)
    assert rig.is_at(held, 4)
    assert 5 in store.known()


def test_any_version_is_reached_from_any_other_in_place(rig: Rig):
    held, fused = rig.store.load(7).held, {}
    for version in (0, 5, 7, 1, 6, 3, 7, 7):
        rig.store.move(held, version)
        assert rig.is_at(held, version)
    fused = {"w": torch.zeros(128, 64, dtype=torch.bfloat16)[32:96], "n": torch.zeros(16)}
    held.restore(fused)
    live = HeldVersion.of(7, fused)
    rig.store.move(live, 4)  # straight in memory that somebody else reads
    assert torch.equal(fused["w"], rig.bits[4]["w"])


def test_the_names_alone_say_what_there_is(rig: Rig):
    known = rig.store.known()
    assert {version: (each.parent, each.anchored) for version, each in known.items()} == {
        0: (None, True), 1: (0, False), 2: (1, False), 3: (2, True), 4: (3, False), 5: (4, False), 6: (2, False),
        7: (6, False),
    }  # fmt: skip


def test_what_is_written_is_counted(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.held.restore(rig.live)
    rig.live["w"].view(torch.int16)[0, :7] += 1
    written = rig.store.update(1, rig.held, rig.live)
    assert (written.version, written.changed, written.total) == (1, 7, 64 * 64 + 16)
    assert written.size_bytes == sum(each.stat().st_size for each in (tmp_path / "update-000001-from-000000").iterdir())
    assert written.digest == HeldVersion.of(1, rig.live).digest == rig.held.digest
    assert written.seconds > 0


def test_writing_to_loaded_weights_changes_no_file(rig: Rig):
    held = rig.store.load(0).held
    held.tensors["w"].zero_()
    sealed_directory.verify(rig.store.directory / "anchor-000000")
    assert rig.is_at(rig.store.load(0).held, 0)


# --- what must not happen


def test_a_number_is_never_used_twice(rig: Rig):
    for taken in (7, 3):
        with pytest.raises(CheckpointError, match="version 7 was there before"):
            rig.store.update(taken, rig.held, rig.live)
    sealed_directory.quarantine(rig.store.directory / "update-000007-from-000006")
    with pytest.raises(CheckpointError, match="version 7 was there before"):
        VersionStore(rig.store.directory).update(7, rig.store.load(6).held, rig.live)


def test_an_update_follows_a_version_that_is_there(rig: Rig):
    with pytest.raises(CheckpointError, match="version 9, the parent of 12, was never written"):
        rig.store.update(12, HeldVersion.copy_of(9, rig.live), rig.live)


def test_an_anchor_of_other_weights_than_the_version_s_is_refused(rig: Rig):
    with pytest.raises(CheckpointError, match="anchor 5: these weights have digest"):
        rig.store.anchor(5, rig.bits[4])
    assert not rig.store.known()[5].anchored


def test_an_anchor_that_holds_other_weights_than_it_says_is_refused(rig: Rig):
    """Sealed all the same: whoever wrote it made the mistake."""
    path = rig.store.directory / "anchor-000000"
    sealed_directory.remove(path)
    with sealed_directory.sealed(path) as directory:
        save_file(rig.bits[1], directory / "weights.safetensors")
        save_file(state(0), directory / "state.safetensors")
        (directory / "version.json").write_text(json.dumps({"version": 0, "digest": "0" * 16, "notes": {}}))
    with pytest.raises(CheckpointDamaged, match="its weights have digest"):
        VersionStore(rig.store.directory).load(1)


def test_a_write_that_fails_leaves_the_version_before(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    before = rig.store.known()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    live = {name: tensor.clone() for name, tensor in rig.live.items()}
    live["n"] += 1
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        rig.store.update(8, rig.held, live)
    monkeypatch.undo()
    assert rig.is_at(rig.held, 7)
    assert rig.store.known() == before
    rig.store.update(9, rig.held, live)
    assert rig.store.load(9).held.digest == rig.held.digest


def test_any_damaged_byte_is_found_and_the_last_whole_version_is_used(tmp_path: Path):
    """Each file of the newest update, at twelve places; and each file missing."""
    rig = Rig(tmp_path / "v")
    for version in (1, 2, 3):
        rig.train(version)
    path, rng = rig.store.directory / "update-000003-from-000002", random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in [0.0, 1.0, *(rng.random() for _ in range(10))]:
            damage(file, place)
            with pytest.raises(CheckpointDamaged, match="update-000003-from-000002"):
                VersionStore(rig.store.directory).load(3)
            file.write_bytes(whole)
        file.unlink()
        with pytest.raises(CheckpointDamaged, match="update-000003-from-000002"):
            VersionStore(rig.store.directory).load(3)
        file.write_bytes(whole)
    assert rig.is_at(VersionStore(rig.store.directory).load(3).held, 3)
    damage(path / "update.safetensors")
    loaded, reasons = VersionStore(rig.store.directory).whole(3)
    assert rig.is_at(loaded.held, 2)
    assert any("damaged-update-000003-from-000002" in reason for reason in reasons)
    assert not path.exists()


def test_a_damaged_way_is_gone_around(rig: Rig):
    """5 from its anchor 3; with 4 damaged, nothing leads there any more, and 7 still comes from 0."""
    directory = rig.store.directory
    damage(directory / "anchor-000000" / "weights.safetensors")
    loaded = VersionStore(directory).load(1)  # back from anchor 3
    assert rig.is_at(loaded.held, 1)
    assert loaded.state is None
    damage(directory / "update-000004-from-000003" / "update.safetensors")
    store = VersionStore(directory)
    with pytest.raises(CheckpointDamaged, match="update-000004-from-000003"):
        store.load(5)
    held = store.load(7).held
    with pytest.raises(CheckpointDamaged, match=r"no undamaged path leads from an anchor to version 5.*000004"):
        store.move(held, 5)
    assert rig.is_at(held, 7)
    assert store.move(held, 3) == ""
    assert rig.is_at(held, 3)
    damage(directory / "update-000006-from-000002" / "update.safetensors")
    assert rig.is_at(held, 3)
    with pytest.raises(CheckpointDamaged, match="000006"):
        store.move(held, 7)


def test_where_no_way_leads_there_a_version_is_read_from_its_anchor(rig: Rig):
    damage(rig.store.directory / "update-000003-from-000002" / "update.safetensors")
    store = VersionStore(rig.store.directory)
    held = store.load(7).held
    memory = held.tensors["w"]
    why = store.move(held, 5)
    assert "no updates lead from version 7 to 5 (update-000003-from-000002: " in why
    assert rig.is_at(held, 5)
    assert held.tensors["w"] is memory
    assert held.digests == HeldVersion.of(5, rig.bits[5]).digests


def test_where_nothing_is_whole_it_says_so(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.train(1)
    damage(tmp_path / "anchor-000000" / "weights.safetensors")
    with pytest.raises(CheckpointDamaged, match="version 1 and all before it are damaged"):
        VersionStore(tmp_path).whole(1)


def test_what_a_killed_writer_left_is_no_version(rig: Rig):
    directory = rig.store.directory
    half = directory / ".update-000008-from-000007.4711.1.tmp"
    half.mkdir()
    (half / "update.safetensors").write_bytes(b"half")
    assert 8 not in rig.store.known()
    rig.store.sweep()
    assert not half.exists()


# --- what goes, and when


def test_orphans_and_what_nobody_needs_go_and_the_rest_stays_reachable(rig: Rig):
    rig.store.forget({5, 7})  # 3..5 from anchor 3; 7 from 0 over 1, 2, 6
    assert sorted(path.name for path in rig.store.directory.iterdir()) == [
        "anchor-000000", "anchor-000003", "update-000001-from-000000", "update-000002-from-000001",
        "update-000003-from-000002", "update-000004-from-000003", "update-000005-from-000004",
        "update-000006-from-000002", "update-000007-from-000006",
    ]  # fmt: skip
    rig.store.forget({4, 5})
    assert sorted(path.name for path in rig.store.directory.iterdir()) == [
        "anchor-000003", "update-000004-from-000003", "update-000005-from-000004",
    ]  # fmt: skip
    held = rig.store.load(5).held
    rig.store.move(held, 4)
    assert rig.is_at(held, 4)


def test_what_damaged_files_leave_behind_is_not_removed(rig: Rig):
    """3 is anchored: the way around it is remembered; and of 4 and 5, that nothing leads to, all stays."""
    with pytest.raises(CheckpointError, match="version 11 is to be kept, but is not there"):
        rig.store.forget({5, 11})
    damage(rig.store.directory / "anchor-000003" / "weights.safetensors")
    store = VersionStore(rig.store.directory)
    store.load(5)  # it found out
    store.forget({5})
    assert rig.is_at(store.load(5).held, 5)
    damage(rig.store.directory / "update-000004-from-000003" / "update.safetensors")
    store = VersionStore(rig.store.directory)
    loaded, _ = store.whole(5)
    assert rig.is_at(loaded.held, 3)
    store.forget({3, 5})
    assert (rig.store.directory / "update-000005-from-000004").exists()
    assert rig.is_at(store.load(3).held, 3)


def test_anchors_are_due_by_count_and_by_bytes(tmp_path: Path):
    rig = Rig(tmp_path / "a", anchor_every=3, anchor_share=100.0)
    due: list[bool] = []
    for version in range(1, 5):
        rig.train(version)
        due.append(rig.store.anchor_due(version))
        if due[-1]:
            rig.store.anchor(version, rig.live)
    assert due == [False, False, True, False]
    small = Rig(tmp_path / "b", anchor_every=1000, anchor_share=0.2)
    small.train(1)
    one = (tmp_path / "b" / "update-000001-from-000000" / "update.safetensors").stat().st_size
    whole = (tmp_path / "b" / "anchor-000000" / "weights.safetensors").stat().st_size
    while not small.store.anchor_due(small.held.version):
        small.train(small.held.version + 1)
    assert abs(small.held.version - 0.2 * whole / one) <= 2


def test_anchors_can_be_read_by_anything_that_reads_safetensors(rig: Rig):
    found = load_file(rig.store.directory / "anchor-000003" / "weights.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in rig.bits[3].items())
