"""What a run on several hosts refuses before its first step: a directory or an address that one of them lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.io import shared_directory
from tandem.io.file_system import file_system_of
from tandem.io.shared_directory import token_in, why_unseen
from tandem.recipes import crew as crews
from tandem.spec.load import parse_spec

RL: dict[str, Any] = {
    "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
    "train": {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 2}, "engine": {"kind": "server"},
    "sync": {"bridge": "broadcast"}, "parallel": {"ranks": 4, "hosts": 2},
}  # fmt: skip


class Crew:
    """Of which the other ranks see these directories."""

    def __init__(self, hosts: list[str], seen: list[Path], kinds: list[str] | None = None) -> None:
        self.hosts, self._seen, self._kinds = hosts, seen, kinds
        self.broken = ""

    def order(self, name: str, **what: Any) -> list[str]:
        if name == "file_system":
            assert self._kinds is not None, "the directories are not asked for"
            return self._kinds
        assert name == "see"
        return [why_unseen(each, what["token"]) for each in (Path(what["path"]), *self._seen)]

    def lost_by_now(self) -> str:
        return ""

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_directory, "ENOUGH_S", 0.1)


def test_a_directory_is_seen_where_its_token_is_read(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with token_in(tmp_path) as token, token_in(tmp_path / "other") as another:
        assert token != another
        assert why_unseen(tmp_path, token) == ""
        assert why_unseen(tmp_path / "other", token) == f"{tmp_path}/other is another directory here"
        assert why_unseen(tmp_path / "none", token) == f"{tmp_path}/none: No such file or directory"
    assert [*tmp_path.glob(".*")] == [], "the token is gone"


def test_a_rank_that_does_not_see_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    crews.refuse_unseen(Crew(["a", "b"], [tmp_path]), tmp_path)
    with pytest.raises(
        SpecError, match=r"--run-dir .*: rank 2 on host b does not see it: .*/b is another directory here"
    ) as refused:
        crews.refuse_unseen(Crew(["a", "a", "b"], [tmp_path, tmp_path / "b"]), tmp_path)
    assert "; name a directory that all hosts share" in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_other_hosts_cannot_reach_is_refused(host: str) -> None:
    spec = parse_spec({**RL, "sync": {"bridge": "broadcast", "host": host}})
    crews.refuse_unreachable(Crew(["a"] * 4, []), spec)
    with pytest.raises(SpecError, match=rf"sync.host = '{host}': rank 2 on host b cannot reach rank 0 by it; set"):
        crews.refuse_unreachable(Crew(["a", "a", "b", "b"], []), spec)
    reached = parse_spec({**RL, "sync": {"bridge": "broadcast", "host": "10.0.0.1"}})
    crews.refuse_unreachable(Crew(["a", "a", "b", "b"], []), reached)


def test_rows_cut_over_hosts_are_refused_where_a_host_writes_whole_pages(tmp_path: Path) -> None:
    whole = {**RL, "parallel": {"ranks": 4, "hosts": 1}}
    hosts, kinds = ["a", "a", "b", "b"], ["ext4", "ext4", "nfs4", "nfs4"]
    with pytest.raises(SpecError, match=r"--run-dir .*: is on nfs4 at rank 2 on host b, .*leave parallel.hosts out"):
        crews.refuse_mixed_writers(Crew(hosts, [], kinds), parse_spec(whole), tmp_path)
    crews.refuse_mixed_writers(Crew(hosts, [], ["lustre"] * 4), parse_spec(whole), tmp_path)
    crews.refuse_mixed_writers(Crew(["a"] * 4, []), parse_spec(whole), tmp_path)
    crews.refuse_mixed_writers(Crew(hosts, []), parse_spec(RL), tmp_path)  # the first host writes for both
    adapters = {"model": {"preset": "tiny", "lora": {"rank": 2}}, "sync": {"bridge": "adapter"}}
    crews.refuse_mixed_writers(Crew(hosts, []), parse_spec({**whole, **adapters}), tmp_path)  # rank 0 writes them


def test_a_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts, place = tmp_path / "mounts", tmp_path.resolve()
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {place}/a\\040b nfs4 rw 0 0\ntmpfs {place}/a tmpfs rw 0 0\n")
    assert file_system_of(place / "a b/run", mounts) == "nfs4"
    assert file_system_of(place / "a/run", mounts) == "tmpfs"
    assert file_system_of(place / "ab", mounts) == "ext4"
    assert file_system_of(place, tmp_path / "none") == ""
    assert file_system_of(Path("/proc")) == "proc"
