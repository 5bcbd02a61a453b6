"""Traps on the way from trainer to engine: tensors lost, damaged, renamed or not finite, files cut or stale.

Each is planted in the real parts, and the first sync with it is refused; docs/traps.md says who paid for which.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trap_rig import LAYER, MODES, STAGED, Rig, Tensors, arriving, leaving, llama, logprobs, saying

from tandem.bridge.collective.control_channel import ControlChannel
from tandem.bridge.files import reader
from tandem.bridge.files.reader import opened
from tandem.errors import SyncError
from tandem.ops.digest import piece

ROOT = Path(__file__).parents[2]
Q, K, OUT = (f"{LAYER}{name}_proj.weight" for name in "qko")
pytestmark = pytest.mark.usefixtures("one_thread")


# --- nothing is planted


@pytest.mark.parametrize("mode", MODES)
def test_without_a_plant_every_mode_is_verified(mode: str, tmp_path: Path) -> None:
    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.publish()
        for version in (1, 2, 3):
            before = rig.proven
            rig.step()
            proof = await rig.publish()
            assert proof.version == version
            assert proof.verified == ("digest" if mode in STAGED else "identity")
            assert proof.logprob_gap <= 1e-4
            await rig.serves_the_proven_one()
            ids = (await rig.answer()).ids
            moved = [abs(a - b) for a, b in zip(logprobs(before, ids), logprobs(rig.proven, ids), strict=True)]
            assert max(moved) > 0.05, "else two versions could not be told apart"

    rig.play(scenario)


# --- tensors that are not what was sent


def rolled(tensors: Tensors) -> Tensors:
    return tensors | {Q: tensors[Q].roll(1, 0)}


def turned(tensors: Tensors) -> Tensors:
    return tensors | {OUT: tensors[OUT].t().contiguous()}


def swapped(tensors: Tensors) -> Tensors:
    return tensors | {Q: tensors[K], K: tensors[Q]}


def other_layer(tensors: Tensors) -> Tensors:
    here, there = Q, Q.replace("layers.0", "layers.1")
    return tensors | {here: tensors[there], there: tensors[here]}


def one_bit(tensors: Tensors) -> Tensors:
    tensors[Q].view(torch.int32)[3, 5] ^= 1
    return tensors


def two_signs(tensors: Tensors) -> Tensors:
    tensors[Q][0, :2] *= -1
    return tensors


def all_signs(tensors: Tensors) -> Tensors:
    tensors[Q] *= -1
    return tensors


def left_out(tensors: Tensors) -> Tensors:
    tensors[Q].zero_()
    return tensors


def rounded(tensors: Tensors) -> Tensors:
    return tensors | {Q: tensors[Q].bfloat16().float()}


DAMAGES = [rolled, turned, swapped, other_layer, one_bit, two_signs, all_signs, left_out, rounded]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_refused_and_the_version_before_goes_on(damage: Any, tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path)

    async def scenario() -> None:
        await rig.begin()
        arriving(rig, damage)
        name = {turned: OUT, swapped: K}.get(damage, Q)  # the first in the file that is not what was sent
        await rig.refused(SyncError, f"what arrived of '{name}' is not what was sent", "stays in service")
        await rig.serves_the_proven_one()
        await rig.recovers()

    rig.play(scenario)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_that_the_engine_believes_in_is_refused_by_the_publisher(damage: Any, tmp_path: Path) -> None:
    rig = Rig("broadcast", tmp_path, canary=None)  # by the digest alone

    async def scenario() -> None:
        await rig.begin()
        arriving(rig, damage, lying=True)
        count = 2 if damage in (swapped, other_layer) else 1
        await rig.refused(SyncError, "the engine serves another", f"than was sent ({count} of")

    rig.play(scenario)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_the_digest_sees_every_damage_and_leaves_what_it_reads_alone(dtype: str) -> None:
    tensor = torch.arange(1, 26).reshape(5, 5).to(getattr(torch, dtype))
    before, found = tensor.clone(), piece(tensor, "t")
    assert torch.equal(tensor, before)
    damaged = [tensor.roll(1, 0), tensor.roll(1, 1), tensor.t(), -tensor]
    for rows, cols in ((1, 2), (2, 1), (2, 2), (4, 4), (5, 5)):
        negated = tensor.clone()
        negated[:rows, :cols] *= -1
        damaged.append(negated)
    assert found not in [piece(each, "t") for each in damaged]
    assert found != piece(tensor, "u")
    assert found == sum(piece(part, "t", 0, start) for start, part in ((0, tensor[:, :2]), (2, tensor[:, 2:]))) % 2**64


# --- names


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that were announced on a control channel, by their numbers there."""
    announce, numbers = ControlChannel.announce, list[int]()

    def watched(channel: ControlChannel, sequence: int, *args: Any, **options: Any) -> None:
        numbers.append(sequence)
        announce(channel, sequence, *args, **options)

    monkeypatch.setattr(ControlChannel, "announce", watched)
    return numbers


def nothing_was_sent(rig: Rig, announced: list[int]) -> bool:
    """Not even announced."""
    if rig.mode in ("disk", "adapter"):
        return not (directory_of(rig) / f"v-{rig.trainer.version:06d}").exists()
    return announced == [*range(1, rig.version + 2)]


def directory_of(rig: Rig) -> Path:
    return Path(rig.source.link["directory"])


def without(*parts: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: each for name, each in tensors.items() if not any(part in name for part in parts)}


def renamed(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def one_more(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.2.mlp.up_proj.weight": tensors[Q]}


NAMES = {
    "q without k and v": (without("k_proj", "v_proj"), "does not send 4", f"'{K}'"),
    "buffers left out": (without("inv_freq"), "does not send 2", "'model.rotary_emb.inv_freq'"),
    "one tensor forgotten": (without("layers.1.mlp.up_proj"), "does not send 1", "layers.1.mlp.up_proj.weight'"),
    "renamed": (renamed, "it sends", "('embed_tokens.weight', "),
    "one that the engine lacks": (one_more, "it sends 1 others", "'model.layers.2.mlp.up_proj.weight'"),
}


@pytest.mark.parametrize("mode", ["disk", "broadcast"])
@pytest.mark.parametrize("which", NAMES)
def test_names_that_do_not_match_are_refused_before_a_byte_moves(
    which: str, mode: str, tmp_path: Path, announced: list[int]
) -> None:
    rig = Rig(mode, tmp_path)
    change, *words = NAMES[which]

    async def scenario() -> None:
        await rig.begin()
        leaving(rig, change)
        await rig.refused(SyncError, *words, "all must match, or none is sent")
        assert nothing_was_sent(rig, announced)
        await rig.serves_the_proven_one()

    rig.play(scenario)


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True)])
@pytest.mark.parametrize("mode", ["disk", "broadcast", "adapter"])
def test_a_head_that_is_tied_on_one_side_only_is_refused(ours: bool, theirs: bool, mode: str, tmp_path: Path) -> None:
    mine, other = llama(tie_word_embeddings=ours), llama(tie_word_embeddings=theirs)
    rig = Rig(mode, tmp_path, ours=mine, theirs=other)

    async def scenario() -> None:
        await rig.refused(SyncError, "'lm_head.weight'")
        assert rig.engine.version == -1

    rig.play(scenario)


@pytest.mark.parametrize("mode", ["disk", "broadcast"])
def test_a_tensor_that_the_engine_s_end_drops_is_refused(mode: str, tmp_path: Path) -> None:
    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.begin()
        arriving(rig, without(Q), lying=True)
        await rig.refused(SyncError, f"on one side only, as '{Q}'", "nothing is served unless all are mapped")
        await rig.serves_the_proven_one()
        await rig.recovers()

    rig.play(scenario)


def test_a_tensor_that_the_engine_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path)

    async def scenario() -> None:
        await rig.begin()
        saying(rig, lambda served: replace(served, fingerprints=without(Q)(dict(served.fingerprints))))
        await rig.refused(SyncError, f"are on one side only, as '{Q}'")

    rig.play(scenario)


def test_another_type_than_is_served_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path)

    async def scenario() -> None:
        await rig.begin()
        arriving(rig, lambda tensors: tensors | {Q: tensors[Q].bfloat16()}, lying=True)
        await rig.refused(SyncError, f"'{Q}' arrived as torch.bfloat16", "is served as torch.float32")
        await rig.serves_the_proven_one()

    rig.play(scenario)


# --- numbers that are none


@pytest.mark.parametrize("mode", STAGED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_before_a_byte_moves(
    value: float, mode: str, tmp_path: Path, announced: list[int]
) -> None:
    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.begin()
        name, tensor = [each for each in rig.module.named_parameters() if each[1].requires_grad][3]
        rig.step = spoiling(rig.step, tensor, value)
        said = await rig.refused(SyncError, "holds a value that is not finite")
        assert name.replace(".default", "").split(".lora_")[0] in said
        assert nothing_was_sent(rig, announced)
        await rig.serves_the_proven_one()

    rig.play(scenario)


def spoiling(step: Callable[[], None], tensor: Any, value: float) -> Any:
    def spoil() -> None:
        step()
        with torch.no_grad():
            tensor.view(-1)[-1] = value

    return spoil


def test_a_value_that_the_served_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, theirs=llama().half(), canary=None)

    async def scenario() -> None:
        await rig.publish()
        rig.step = spoiling(rig.step, rig.module.model.norm.weight, 1e5)
        await rig.refused(SyncError, "'model.norm.weight'", "does not fit torch.float16")
        assert rig.engine.version == rig.version

    rig.play(scenario)


# --- files


def cut_file(version: Path) -> None:
    file = next(version.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])


def changed_file(version: Path) -> None:
    file = next(version.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def lost_file(version: Path) -> None:
    next(version.glob("*.safetensors")).unlink()


def lost_manifest(version: Path) -> None:
    (version / "tandem.json").unlink()


def lost_directory(version: Path) -> None:
    shutil.rmtree(version)


def older_version(version: Path) -> None:
    shutil.rmtree(version)
    shutil.copytree(version.with_name("v-000001"), version)


FILES = {
    cut_file: "it was cut or written over",
    changed_file: "is not what was sent",
    lost_file: "is missing; this version will not be served",
    lost_manifest: "has no tandem.json",
    lost_directory: "has no tandem.json",
    older_version: "holds version 1, not 2",
}


@pytest.mark.parametrize("mode", ["disk", "adapter"])
@pytest.mark.parametrize("damage", FILES, ids=lambda damage: damage.__name__)
def test_files_that_are_not_those_that_were_sent_are_refused(
    damage: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.begin()

        def struck(directory: Path, mode: str, version: int) -> Any:
            """As soon as it is there."""
            damage(directory)
            return opened(directory, mode, version)

        monkeypatch.setattr(reader, "opened", struck)
        await rig.refused(SyncError, FILES[damage])
        await rig.serves_the_proven_one()

    rig.play(scenario)


@pytest.mark.parametrize("mode", ["disk", "adapter"])
def test_a_version_s_files_may_be_written_over_while_it_is_served(mode: str, tmp_path: Path) -> None:
    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.begin()
        for file in directory_of(rig).glob("*/*.safetensors"):
            with file.open("r+b") as handle:
                size = file.stat().st_size
                handle.seek(size // 2)
                handle.write(b"\x40" * (size // 2))
        await rig.serves_the_proven_one()

    rig.play(scenario)


# --- the table


def test_every_trap_in_the_tables_has_its_test() -> None:
    """A test that was renamed or deleted is noticed."""
    page = (ROOT / "docs" / "traps.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| trap |")]
    planted = 0
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, f"no test is named: {row}"
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
        planted += any(file.startswith("tests/faults/test_trap") for file, _ in named)
    assert planted >= 40
