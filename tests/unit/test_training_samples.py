"""The answers that a run trained on are kept whole, bounded, and found again."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from privacy import readable_by_others
from tandem.cli.main import app
from tandem.errors import RunError
from tandem.io import kept_samples
from tandem.io.kept_samples import KeptSamples, samples
from tandem.io.sqlite_store import read_only
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Trajectory


def trajectory(answer: str, reward: float = 0.0, **more: Any) -> Trajectory:
    messages = [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": answer}]
    return Trajectory(
        ids=[1, 2, 3, 4], trained=[False, False, True, True], logprobs=[0.0, 0.0, -1.0, -2.0], versions=[-1, -1, 4, 5],
        reward=reward, metrics={"correct": reward}, task_id="t", **{"messages": messages, **more},
    )  # fmt: skip


def opened(run: Path, after_step: int = 0, **more: Any) -> tuple[KeptSamples, list[str]]:
    said: list[str] = []
    arguments = {"share": 1.0, "max_bytes": 2**30, "decode": lambda ids: f"<{len(ids)} ids>", "tell": said.append}
    return KeptSamples(run, after_step=after_step, **{**arguments, **more}), said


def written(run: Path, steps: dict[int, list[list[Trajectory]]], **more: Any) -> list[str]:
    store, said = opened(run, **more)
    for step, groups in steps.items():
        store.keep(step, groups)
        store.settle()
    store.close()
    return said


def test_a_sample_says_what_happened(tmp_path: Path):
    written(tmp_path, {3: [[trajectory("41", 0.0), trajectory("42", 1.0, status="truncated")]]})
    last, first = samples(tmp_path)
    assert first["answer"] == "41"
    assert last == {
        "id": 2, "step": 3, "version": 4, "group": 0, "reward": 1.0, "finish": "length", "tokens": 2, "logprob": -1.5,
        "rewards": {"correct": 1.0}, "task": "t", "prompt": "What is 6 x 7?", "answer": "42",
        "messages": [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "42"}],
    }  # fmt: skip
    assert readable_by_others(tmp_path / "samples") == []


def test_searches_find_what_a_slow_look_at_all_finds(tmp_path: Path):
    """Of 2,000 samples in blocks, whatever is asked for; letters of other scripts, quotes and line ends too."""
    words = ["Straße", "ÄPFEL", 'say "no"', "line\nend", "naïve", "x", "back\\slash", "Zwölf Boxkämpfer jagen"]
    steps = {
        step: [[trajectory(f"{words[(step * number) % 8]} {step * number}", number / 40) for number in range(40)]]
        for step in range(1, 51)
    }
    written(tmp_path, steps)
    everything = samples(tmp_path)
    assert len(everything) == 2000
    for grep in (
        *words,
        "strasse",
        "äpfel",
        'SAY "NO',
        "\nend",
        "boxkämpfer jagen 4",
        "1",
        "nowhere",
        "\\sl",
        '"content"',
    ):
        expected = [each for each in everything if grep.casefold() in (each["prompt"] + each["answer"]).casefold()]
        assert samples(tmp_path, grep=grep) == expected, grep
        assert samples(tmp_path, grep=grep, limit=3) == expected[:3]
    kept = [each for each in everything if 7 <= each["step"] <= 9 and 0.25 <= each["reward"] <= 0.5]
    assert samples(tmp_path, steps=(7, 9), min_reward=0.25, max_reward=0.5) == kept
    assert len(kept) == 33


def test_a_search_opens_only_the_blocks_that_may_have_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, {step: [[trajectory(f"the answer of step {step:04d}")]] for step in range(1, 101)})
    unpacked: list[int] = []
    real = kept_samples.zlib.decompress
    monkeypatch.setattr(kept_samples.zlib, "decompress", lambda content: unpacked.append(1) or real(content))
    assert [each["step"] for each in samples(tmp_path, grep="of step 0042")] == [42]
    assert len(unpacked) <= 10


def test_a_resumed_run_has_each_step_once(tmp_path: Path):
    written(tmp_path, {step: [[trajectory(f"first {step}")]] for step in range(1, 6)})
    written(tmp_path, {step: [[trajectory(f"second {step}")]] for step in range(3, 8)}, after_step=2)
    found = [(each["step"], each["answer"].split()[0]) for each in reversed(samples(tmp_path))]
    assert found == [(1, "first"), (2, "first"), *((step, "second") for step in range(3, 8))]


def test_the_oldest_go_when_the_space_is_used_and_the_run_says_so_once(tmp_path: Path):
    one = [[trajectory("a b c " * 50) for _ in range(8)]]
    said = written(tmp_path, dict.fromkeys(range(1, 301), one), max_bytes=50_000)
    found = samples(tmp_path)
    steps = sorted({each["step"] for each in found})
    assert steps == list(range(steps[0], 301))
    assert 1 < steps[0] < 290
    assert said == ["samples: 4.65661e-05 GiB are used (samples.max_gib); the oldest go"]
    with read_only(tmp_path / "samples") as db:
        assert db.execute("SELECT sum(size) FROM blocks").fetchone()[0] <= 50_000
        assert db.execute("SELECT count(*) FROM samples").fetchone()[0] == len(found)
    assert (tmp_path / "samples" / "index.sqlite3").stat().st_size < 200_000
    assert written(tmp_path, {301: one}, after_step=300, max_bytes=50_000) == said  # it still counts what was there


def test_a_share_keeps_whole_groups_and_the_same_ones_each_time(tmp_path: Path):
    steps = {step: [[trajectory(str(group)), trajectory(str(group))] for group in range(10)] for step in range(1, 41)}
    for name in ("a", "b"):
        written(tmp_path / name, steps, share=0.25)
    found = samples(tmp_path / "a")
    groups = {(each["step"], each["group"]) for each in found}
    assert len(found) == 2 * len(groups)
    assert 70 < len(groups) < 130
    assert samples(tmp_path / "b") == found


def test_a_disk_that_is_slower_than_the_steps_costs_samples_and_not_memory_or_time(tmp_path: Path):
    store, said = opened(tmp_path)
    held = threading.Event()
    store._store.submit(lambda _: held.wait(30))
    for step in range(1, 21):
        store.keep(step, [[trajectory("x")]])
    held.set()
    store.settle()
    store.keep(21, [[trajectory("x")]])
    store.close()
    assert sorted(each["step"] for each in samples(tmp_path)) == [1, 2, 3, 4, 21]
    assert said == ["samples: those of step 5 are not kept: the disk is slower than the steps"]


def test_text_that_is_missing_is_decoded_and_broken_text_is_kept(tmp_path: Path):
    half = trajectory("half \ud800 a pair \x00", float("nan"))
    written(tmp_path, {1: [[trajectory("", messages=[])], [half]]})
    broken, decoded = samples(tmp_path)
    assert (decoded["prompt"], decoded["answer"]) == ("<2 ids>", "<2 ids>")
    assert broken["reward"] is None
    assert broken["answer"].startswith("half ")


def test_a_search_works_while_the_run_writes(tmp_path: Path):
    store, _ = opened(tmp_path)
    store.keep(1, [[trajectory("x")]])
    store.settle()
    assert len(samples(tmp_path)) == 1
    store.close()


def test_the_command_prints_text_or_json_and_says_what_is_wrong(tmp_path: Path):
    written(tmp_path, {3: [[trajectory("forty\x1b[31m two", 1.0)]], 4: [[trajectory("41")]]})
    run = CliRunner()
    told = run.invoke(app, ["samples", str(tmp_path), "--min-reward", "0.9"]).output
    assert (
        "step 3 · version 4 · group 0 · task t · reward 1 (correct 1) · 2 tokens, ended · mean logprob -1.500" in told
    )
    assert "user: What is 6 x 7?\nassistant: forty[31m two\n1 samples\n" in told
    asked = run.invoke(app, ["samples", str(tmp_path), "--step", "3-4", "--grep", "FORTY", "--json"])
    assert [each["step"] for each in json.loads(asked.output)] == [3]
    assert "write one step" in run.invoke(app, ["samples", str(tmp_path), "--step", "x"]).output
    with pytest.raises(RunError, match="has no samples/"):
        samples(tmp_path / "nowhere")


# --- what is known of each token


RENDERER = Renderer(byte_tokenizer())
(END,) = RENDERER.end_ids
spell = partial(RENDERER.decode, skip_special=False)


def ids_of(text: str) -> list[int]:
    return RENDERER.tokenizer.encode(text, add_special_tokens=False)


def answer(turns: list[list[int]], said: list[str], versions: list[int], logprobs: list[float]) -> Trajectory:
    """Turns of sampled ids, with two ids of a tool's answer between them."""
    ids, trained = ids_of("ab"), [False, False]
    for turn in turns:
        ids += [*turn, *ids_of("  ")]
        trained += [True] * len(turn) + [False, False]
    of, lp = iter(versions), iter(logprobs)
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    for text in said:
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "  "}]
    return Trajectory(
        ids=ids, trained=trained, versions=[next(of) if each else -1 for each in trained],
        logprobs=[next(lp) if each else 0.0 for each in trained], task_id="t", messages=messages,
    )  # fmt: skip


def test_each_token_has_its_text_logprob_and_version(tmp_path: Path):
    """Two turns; the first has a special token behind its text, the second a character of two tokens."""
    logprobs = [-0.01, -1, -5, 0, -0.3, -40]
    two_turns = answer([[*ids_of("cd"), END], ids_of("eé")], ["cd", "eé"], [4, 4, 5, 5, 5, 6], logprobs)
    written(tmp_path, {1: [[trajectory("41")]], 2: [[two_turns, trajectory("other")]]}, spell=spell)
    found = next(each for each in samples(tmp_path) if each["answer"] == "eé")
    first, second = kept_samples.sample_tokens(tmp_path, found["id"])
    assert [(each.text, each.version) for each in first] == [("c", 4), ("d", 4), (spell([END]), 5)]
    assert [(each.text, each.version) for each in second] == [("e", 5), ("é", 5), ("", 6)]
    for one, logprob in zip([*first, *second], logprobs, strict=True):
        assert abs(one.logprob - logprob) <= 0.031 * (1 - logprob)


def test_a_turn_whose_message_is_not_in_it_keeps_its_own_text(tmp_path: Path):
    """A message may have been changed since, or be a tool call; what was sampled is shown."""
    written(tmp_path, {1: [[answer([ids_of("cd")], ["something else"], [4, 4], [-1, -1])]]}, spell=spell)
    ((one, two),) = kept_samples.sample_tokens(tmp_path, samples(tmp_path)[0]["id"])
    assert (one.text, two.text) == ("c", "d")


def test_long_tokens_and_unlikely_ones_come_back(tmp_path: Path):
    texts = {20: "x" * 90, 21: "y" * 500, 22: ""}
    ids = [20, 21, 22, 20]
    written(
        tmp_path, {1: [[answer([ids], ["-"], [1, 1, 1, 1], [-1e5, -0.0, float("-inf"), float("nan")])]]},
        spell=lambda those: "".join(texts[each] for each in those),
    )  # fmt: skip
    (found,) = kept_samples.sample_tokens(tmp_path, samples(tmp_path)[0]["id"])
    assert [len(each.text) for each in found] == [90, 500, 0, 90]
    assert max(found[0].logprob, found[2].logprob) < -9e4
    assert found[1].logprob == found[3].logprob == 0.0


def test_a_store_without_tokens_has_none_and_is_carried_on(tmp_path: Path):
    """One of an earlier Tandem: its column comes with the next version of the store."""
    written(tmp_path, {1: [[trajectory("41")]]})
    with closing(sqlite3.connect(tmp_path / "samples" / "index.sqlite3")) as db:
        db.execute("ALTER TABLE blocks DROP COLUMN marks")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    assert kept_samples.sample_tokens(tmp_path, samples(tmp_path)[0]["id"]) == []
    written(tmp_path, {2: [[answer([ids_of("cd")], ["cd"], [4, 4], [-1, -1])]]}, spell=spell, after_step=1)
    new, old = samples(tmp_path)
    assert [each.text for each in kept_samples.sample_tokens(tmp_path, new["id"])[0]] == ["c", "d"]
    assert kept_samples.sample_tokens(tmp_path, old["id"]) == []
    assert kept_samples.sample_tokens(tmp_path, 10**9) == []
