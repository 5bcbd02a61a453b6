"""One name for all models of a form in vLLM's compile cache, and never two models under it at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.engine.vllm.compile_cache import ModelLink, package_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(at: Path, weights: str, form: str = "{}") -> str:
    at.mkdir(parents=True)
    (at / "config.json").write_text(form)
    (at / "model.safetensors").write_text(weights)
    return str(at)


def weights_of(name: ModelLink) -> str:
    return (Path(name.path) / "model.safetensors").read_text()


def test_one_after_the_other_has_the_same_name_and_its_own_weights(tmp_path: Path):
    paths = set[str]()
    for version in ("1", "2", "3"):
        name = ModelLink(model(tmp_path / version, version))
        assert (weights_of(name), name.why_not) == (version, "")
        paths.add(name.path)
        name.close()
    assert len(paths) == 1
    other = ModelLink(model(tmp_path / "other", "0", form='{"layers": 2}'))
    assert other.path not in paths
    other.close()


def test_while_one_is_used_nobody_turns_it_to_other_weights(tmp_path: Path):
    one = model(tmp_path / "one", "1")
    first, again = ModelLink(one), ModelLink(one)
    assert first.path == again.path
    other = ModelLink(model(tmp_path / "two", "2"))
    assert other.path != first.path
    assert [weights_of(each) for each in (first, again, other)] == ["1", "1", "2"]
    first.close()
    third = ModelLink(model(tmp_path / "three", "3"))
    assert third.path not in (again.path, other.path)
    assert [weights_of(each) for each in (again, other, third)] == ["1", "2", "3"]
    for each in (again, other, third):
        each.close()
    assert ModelLink(str(tmp_path / "three")).path == again.path


HOLD = """
import sys
from tandem.engine.vllm.compile_cache import ModelLink
name = ModelLink(sys.argv[1])
print(name.path, flush=True)
input()
"""


def test_other_processes_are_others_too_and_one_that_was_killed_holds_nothing(tmp_path: Path):
    theirs = model(tmp_path / "one", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, theirs], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    ours = ModelLink(model(tmp_path / "two", "2"))
    assert ours.path != path
    process.kill()
    process.communicate()
    later = ModelLink(model(tmp_path / "three", "3"))
    assert (later.path, weights_of(later), weights_of(ours)) == (path, "3", "2")
    ours.close()
    later.close()


def test_what_has_no_form_here_keeps_its_own_name_and_says_why(tmp_path: Path, cache: Path):
    assert (ModelLink("Qwen/Qwen3-8B").path, ModelLink("x/y").why_not) == (
        "Qwen/Qwen3-8B",
        "it is not a directory",
    )
    (tmp_path / "empty").mkdir()
    name = ModelLink(str(tmp_path / "empty"))
    assert name.path == str(tmp_path / "empty")
    assert "its config.json cannot be read" in name.why_not
    cache.write_text("no directory")
    name = ModelLink(path := model(tmp_path / "one", "1"))
    assert name.path == path
    assert "no link can be made" in name.why_not


def test_the_package_is_found_under_one_name_and_alone(tmp_path: Path, cache: Path):
    import tandem

    path = package_path(tmp_path / "unused")
    assert [each.name for each in path.iterdir()] == ["tandem"]
    assert (path / "tandem").resolve() == Path(tandem.__file__).parent
    (path / "tandem").unlink()
    (path / "tandem").symlink_to(tmp_path)
    assert package_path(tmp_path / "unused") == path
    assert (path / "tandem").resolve() == Path(tandem.__file__).parent
    assert not (tmp_path / "unused").exists()


def test_where_no_name_can_be_kept_the_package_is_found_all_the_same(tmp_path: Path, cache: Path):
    cache.write_text("no directory")
    (otherwise := tmp_path / "otherwise").mkdir()
    assert package_path(otherwise) == otherwise
    assert (otherwise / "tandem" / "engine" / "vllm" / "compile_cache.py").is_file()


def test_who_has_no_home_starts_vllm_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    (otherwise := tmp_path / "otherwise").mkdir()
    assert package_path(otherwise) == otherwise
    name = ModelLink(path := model(tmp_path / "one", "1"))
    assert name.path == path
    assert "home directory" in name.why_not


def test_a_lock_is_given_back_with_what_held_it_and_a_forked_child_keeps_none(tmp_path: Path):
    name = ModelLink(model(tmp_path / "one", "1"))
    path = name.path
    child = os.fork()
    if not child:
        os.read(os.pipe()[0], 1)
    try:
        name.close()
        name.close()
        other = ModelLink(model(tmp_path / "two", "2"))
        assert other.path == path
        del other
        gc.collect()
        assert ModelLink(model(tmp_path / "three", "3")).path == path
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
