"""The wire of files: what a directory holds, how long it stays, and every damage refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import ADAPTER_CONFIG, COPYING, FILES, as_served, bits, meet, reply, skeleton, tensors_for, weights_of
from safetensors.torch import load_file

from tandem.bridge.common.manifest import Manifest, checksum
from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge
from tandem.errors import SyncError
from tandem.io.file_system import memory_backed
from tandem.ops.digest import fingerprints
from tandem.protocols import WeightBridge, WeightSource


@pytest.fixture(params=FILES)
def bridge(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightBridge]:
    bridge = COPYING[request.param](tmp_path, 5.0)
    yield bridge
    bridge.close()


def versions(source: WeightSource) -> list[str]:
    return sorted(path.name for path in Path(source.link["directory"]).iterdir())


def test_the_newest_two_versions_stay(bridge: WeightBridge) -> None:
    source = meet(bridge)
    for version in range(1, 6):
        bridge.send(weights_of(version, bridge.carries))
        assert source.receive(version).version == version
    assert versions(source) == ["v-000004", "v-000005"]


def test_the_version_in_use_stays_when_a_new_meeting_begins(bridge: WeightBridge) -> None:
    old, first = meet(bridge), weights_of(1, bridge.carries)
    bridge.send(first)
    new = meet(bridge)
    bridge.send(weights_of(2, bridge.carries))
    assert (versions(old), versions(new)) == (["v-000001"], ["v-000002"])


def test_a_version_sent_again_takes_the_place_of_the_first(bridge: WeightBridge) -> None:
    source = meet(bridge)
    for sign in (1, -1):
        drawn = tensors_for(bridge.carries, 1)
        tensors = {name: sign * tensor if tensor.is_floating_point() else tensor for name, tensor in drawn.items()}
        bridge.send(weights_of(1, bridge.carries, tensors))
    name = "half" if bridge.carries == "full" else "base_model.model.q.lora_B.weight"
    assert torch.equal(dict(source.receive(1).tensors())[name], tensors[name])
    assert versions(source) == ["v-000001"]


def test_any_reader_of_safetensors_finds_the_same(bridge: WeightBridge) -> None:
    source = meet(bridge)
    bridge.send(weights_of(1, bridge.carries))
    directory = Path(source.receive(1).path)
    found = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = as_served(bridge.carries, 1)
    expected.pop("rotary", None)
    assert bits(found) == bits(expected)


def test_a_checkpoint_is_whole_and_brings_nothing_of_other_weights(tmp_path: Path) -> None:
    bridge = DiskBridge(tmp_path / "versions", skeleton(tmp_path), buffers=["rotary"])
    source = meet(bridge)
    bridge.send(weights_of(1, "full"))
    directory = Path(source.receive(1).path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "buffers.tandem", "chat_template.jinja", "config.json", "model.safetensors", "tandem.json", "tokenizer.json",
    ]  # fmt: skip
    (directory / "config.json").write_text("changed by hand")
    assert "config.json" in (tmp_path / "model" / "config.json").read_text()  # the model itself is not touched
    bridge.close()


def test_a_large_checkpoint_is_split_and_indexed(tmp_path: Path) -> None:
    bridge = DiskBridge(tmp_path / "versions", skeleton(tmp_path), buffers=["rotary"], shard_bytes=3000)
    source = meet(bridge)
    bridge.send(weights_of(1, "full"))
    received = source.receive(1)
    assert bits(received.tensors()) == bits(as_served("full", 1))
    directory = Path(received.path)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in directory.glob("*.safetensors")}
    assert len(shards) > 2
    assert {name: file for file, part in shards.items() for name in part} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for part in shards.values() for t in part.values())
    bridge.close()


def test_a_skeleton_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"has no config\.json"):
        DiskBridge(tmp_path / "versions", tmp_path)


def test_an_adapters_configuration_is_what_peft_writes(tmp_path: Path) -> None:
    bridge = AdapterBridge(tmp_path)
    source = meet(bridge)
    bridge.send(weights_of(1, "adapter"))
    config = json.loads((Path(source.receive(1).path) / "adapter_config.json").read_text())
    assert config.items() >= {**ADAPTER_CONFIG, "peft_type": "LORA", "bias": "none"}.items()
    bridge.close()


# --- damage


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.unlink()  # companions are links to one file
    file.write_bytes(content)


def first_digest(directory: Path) -> None:
    manifest = directory / "tandem.json"
    text = manifest.read_text()
    digest = next(iter(json.loads(text)["digests"].values()))
    manifest.write_text(text.replace(digest, digest[::-1]))


def outside(directory: Path) -> None:
    """A manifest that is consistent with itself, and points elsewhere."""
    from tandem.bridge.common.manifest import Manifest

    manifest = directory / "tandem.json"
    mode = json.loads(manifest.read_text())["mode"]
    known = Manifest.from_text(manifest.read_text(), mode)
    files = {f"../{directory.name}/{name}": facts for name, facts in known.files.items()}
    manifest.write_text(Manifest(mode, known.version, known.kind, {}, {}, files=files).to_text())


def beyond(directory: Path) -> None:
    from dataclasses import replace

    from tandem.bridge.common.manifest import Manifest

    manifest = directory / "tandem.json"
    mode = json.loads(manifest.read_text())["mode"]
    known = Manifest.from_text(manifest.read_text(), mode)
    name, entry = next((n, e) for n, e in known.tensors.items() if e.size_bytes)
    far = {**known.tensors, name: replace(entry, offset=known.files[entry.file][0])}
    manifest.write_text(replace(known, tensors=far).to_text())


def renamed(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("v-000001"), directory)


def other_fields(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest whose checksum fits, and which this release would not write."""

    def inflict(directory: Path) -> None:
        manifest = directory / "tandem.json"
        content = json.loads(manifest.read_text())
        told = {key: value for key, value in content.items() if key not in ("format", "checksum")}
        change(told)
        text = json.dumps(told)[1:]
        manifest.write_text(f'{{"format": 4, "checksum": "{checksum(text.encode())}", {text}')

    return inflict


def first_tensor(told: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in told["tensors"].values() if entry["shape"])


def first_file(told: dict[str, Any], head: Any) -> None:
    name, facts = next(iter(told["files"].items()))
    told["files"][name] = [facts[0], head, facts[2]]


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def linked(path: Path) -> None:
    """Moved to another place, to which a link leads."""
    elsewhere = path.parents[2] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def lengthened(directory: Path) -> None:
    with tensors_file(directory).open("ab") as file:
        file.write(b"x")


def tensors_file(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensors cut": (lambda d: cut(tensors_file(d)), "bytes instead of"),
    "tensors longer": (lengthened, "bytes instead of"),
    "a byte of the last tensor": (lambda d: flip(tensors_file(d)), "is not what was sent"),
    "a byte of the header": (lambda d: flip(tensors_file(d), 20), "its checksum does not fit"),
    "a byte of a companion": (lambda d: flip(next(d.glob("*config.json"))), "its checksum does not fit"),
    "tensors missing": (lambda d: tensors_file(d).unlink(), "is missing"),
    "a companion missing": (lambda d: next(d.glob("*config.json")).unlink(), "is missing"),
    "no manifest": (lambda d: (d / "tandem.json").unlink(), "has no tandem.json"),
    "manifest cut": (lambda d: cut(d / "tandem.json"), "is not JSON"),
    "manifest changed": (first_digest, "its checksum does not match its content"),
    "manifest of bytes": (lambda d: (d / "tandem.json").write_bytes(b"\xff\xfe\xff"), "is not text"),
    "manifest of another program": (lambda d: (d / "tandem.json").write_text("{}"), "not of format 4"),
    "manifest that nests too deep": (lambda d: (d / "tandem.json").write_text("[" * 200_000), "is not JSON"),
    "manifest that is waited for": (lambda d: replaced(d / "tandem.json", os.mkfifo), "is not a regular file"),
    "manifest without end": (lambda d: os.truncate(d / "tandem.json", 2**40), "has more than"),
    "manifest without tensors": (other_fields(lambda told: told.pop("tensors")), "does not say what"),
    "manifest with a list of tensors": (other_fields(lambda told: told.update(tensors=[1])), "does not say what"),
    "manifest without digests": (other_fields(lambda told: told.pop("digests")), "does not say what"),
    "manifest with a field more": (other_fields(lambda told: told.update(more=1)), "does not say what"),
    "manifest of a shape of words": (other_fields(lambda t: first_tensor(t).update(shape=["a"])), "does not say what"),
    "manifest of half an offset": (other_fields(lambda t: first_tensor(t).update(offset=0.5)), "does not say what"),
    "manifest of a type of types": (other_fields(lambda t: first_tensor(t).update(dtype=[])), "does not say what"),
    "manifest of a head of words": (other_fields(lambda told: first_file(told, "all")), "does not say what"),
    "manifest of an endless head": (other_fields(lambda told: first_file(told, 2**62)), "does not say what"),
    "tensors linked from elsewhere": (lambda d: linked(tensors_file(d)), "is a link"),
    "tensors that are waited for": (lambda d: replaced(tensors_file(d), os.mkfifo), "is not a regular file"),
    "a companion linked from elsewhere": (lambda d: linked(next(d.glob("*config.json"))), "is a link"),
    "manifest linked from elsewhere": (lambda d: linked(d / "tandem.json"), "is a link"),
    "a version linked from elsewhere": (linked, "is a link"),
    "manifest that leads outside": (outside, "not a file of its own directory"),
    "manifest that leads beyond a file": (beyond, "the manifest places"),
    "another version under this name": (
        renamed,
        "holds version 1, not 2",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("name", "in_one_place"), [("disk", False), ("adapter", False), ("adapter", True)])
def test_damage_is_refused(name: str, in_one_place: bool, damage: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 5.0)
    source = meet(bridge)
    if in_one_place:
        assert source.reuse_buffer()
    for version in (1, 2):
        bridge.send(weights_of(version, bridge.carries))
    inflict, says = DAMAGE[damage]
    inflict(Path(source.link["directory"]) / "v-000002")
    with pytest.raises(SyncError, match=says):
        source.receive(2)
    assert source.receive(1).version == 1
    bridge.close()


def test_a_link_in_place_of_the_directory_that_was_looked_at_leads_nowhere(tmp_path: Path) -> None:
    bridge = COPYING["adapter"](tmp_path, 5.0)
    source = meet(bridge)
    bridge.send(weights_of(1, bridge.carries))
    linked(Path(source.link["directory"]))
    with pytest.raises(SyncError, match="is a link"):
        source.receive(1)
    bridge.close()


def test_a_file_that_becomes_a_link_after_it_was_looked_at_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.bridge.files import reader as files

    bridge = COPYING["disk"](tmp_path, 5.0)
    source = meet(bridge)
    bridge.send(weights_of(1, bridge.carries))
    looked = files.opened

    def then_linked(directory: Path, *rest: Any) -> Manifest:
        manifest = looked(directory, *rest)
        linked(tensors_file(directory))
        return manifest

    monkeypatch.setattr(files, "opened", then_linked)
    with pytest.raises(SyncError, match="is a link"):
        source.receive(1)
    bridge.close()


def test_who_looks_itself_is_left_to_find_what_is_not_what_was_sent(tmp_path: Path) -> None:
    bridge = COPYING["adapter"](tmp_path, 5.0)
    source = meet(bridge)
    assert source.reuse_buffer()
    assert source.verify_where_served()
    bridge.send(weights_of(1, "adapter"))
    flip(tensors_file(Path(source.link["directory"]) / "v-000001"))
    arrived = source.receive(1)
    found = fingerprints(dict(arrived.tensors()))
    assert len([name for name in found if found[name] != arrived.expected[name]]) == 1
    bridge.close()


def test_a_directory_that_is_gone_is_said_at_once(bridge: WeightBridge) -> None:
    source = meet(bridge)
    shutil.rmtree(source.link["directory"])
    with pytest.raises(SyncError, match="is not there"):
        source.receive(1)


@pytest.mark.parametrize("mode", FILES)
def test_what_was_told_to_have_failed_does_not_appear_later(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, text_of, ended = COPYING[mode](tmp_path, 0.3), Manifest.to_text, threading.Event()
    source = meet(bridge)

    def slow(manifest: Manifest) -> str:
        time.sleep(0.6)
        ended.set()
        return text_of(manifest)

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "to_text", slow)
        with pytest.raises(SyncError, match="version 1 was not written"):
            bridge.send(weights_of(1, bridge.carries))
        assert ended.wait(5)
        time.sleep(0.2)
    assert versions(source) == []
    bridge.send(weights_of(1, bridge.carries))
    assert versions(source) == ["v-000001"]
    bridge.close()


def test_a_full_disk_is_an_error_of_the_sync_and_leaves_nothing_behind(tmp_path: Path) -> None:
    import resource

    bridge = AdapterBridge(tmp_path)
    source = meet(bridge)
    bridge.send(weights_of(1, "adapter"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(SyncError, match=r"version 2 was not written .*File too large"):
            bridge.send(weights_of(2, "adapter"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert versions(source) == ["v-000001"]
    bridge.close()


# --- storage


def test_a_directory_that_was_named_from_here_is_told_to_others_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bridge = AdapterBridge(Path("adapters"))
    assert Path(bridge.source().link["directory"]).is_relative_to(tmp_path.resolve() / "adapters")
    bridge.close()


def test_an_adapters_storage_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    bridge = AdapterBridge()
    home = Path(bridge.source().link["directory"]).parent
    assert home.parent == memory_backed()
    assert home.stat().st_mode & 0o777 == 0o700
    bridge.close()
    assert not home.exists()


LEAVE = """
import os, sys
from pathlib import Path
from tandem.bridge.files.adapter import AdapterBridge
bridge = AdapterBridge(Path(sys.argv[1]))
print(bridge.source().link["directory"], flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit()
os.wait() if sys.argv[2] == "fork" else None
print(Path(bridge.source().link["directory"]).is_dir(), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["fork", "killed"])
def test_storage_goes_with_its_process_and_what_a_killed_one_left_goes_with_the_next(end: str, tmp_path: Path) -> None:
    mine = AdapterBridge(tmp_path)
    done = subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path), end], capture_output=True, text=True)
    home = Path(done.stdout.split()[0]).parent
    assert done.stdout.split()[1] == "True"  # a forked child's end leaves its parent's storage alone
    assert home.exists() == (end == "killed")
    AdapterBridge(tmp_path).close()
    assert not home.exists()
    assert Path(mine.source().link["directory"]).is_dir()
    mine.close()


def test_what_an_engine_says_is_kept_for_the_trainers_end(bridge: WeightBridge) -> None:
    source = bridge.source(2)
    source.attached(reply("one"))
    source.attached(reply("two"))
    assert source.reply["boot_id"] == "two"  # pyright: ignore
