import io
import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tandem import recipes
from tandem.errors import RunError
from tandem.io.atomic_write import write_json
from tandem.io.jsonl import JsonlWriter
from tandem.obs.claims import caveat, evidence, headline
from tandem.obs.closing_summary import closing_text
from tandem.obs.report import write_report
from tandem.obs.run_history import drops, evaluations, read_history, timing
from tandem.runs.failure_diagnosis import exits_by_class

RL_EVAL = {
    "before": 0.0,
    "before_rl": 0.11,
    "after": 0.97,
    "after_minus_before_rl": 0.86,
    "interval": [0.816, 0.898],
    "confidence": 0.95,
    "tasks": 256,
}
IMPROVED = {
    "state": "succeeded",
    "verdict": "improved",
    "recipe": "rl",
    "name": "quickstart",
    "steps_done": 30,
    "steps_total": 30,
    "eval": RL_EVAL,
}
ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &amp; \x1b[31m\u202e {{ 7 * 7 }}"


def make_run(directory: Path, status: dict | None = None, *, attack: str = "hello") -> Path:
    directory.mkdir()
    write_json(directory / "status.json", status or IMPROVED)
    (directory / "spec.toml").write_text(f'name = "quickstart"\n# {attack}\n')
    (directory / "log.txt").write_text(f"12:00 started\n12:01 {attack}\n")
    with JsonlWriter(directory / "metrics.jsonl") as writer:
        for step in range(1, 11):
            writer.write({"step": step, "stage": "warmup", "loss/total": 3.0 / step, "time/step_s": 0.1})
        for step in range(11, 31):
            writer.write(
                {
                    "step": step,
                    "stage": "rl",
                    "reward/mean": step / 30,
                    "loss/total": 0.01,
                    "lag/max": 1,
                    "groups/dropped": 3,
                    "groups/dropped/nothing_to_learn": 2,
                    "groups/dropped/raised": 1,
                    "time/step_s": 0.5,
                    "time/generate_s": 0.3,
                    "time/train_s": 0.1,
                    "memory/weights": 0.5,
                    "memory/activations": step / 10,
                    "memory/peak": 4.5,
                    **({"eval/accuracy": 0.5} if step == 20 else {}),
                }
            )
    with JsonlWriter(directory / "sync.jsonl") as writer:
        for version in range(10, 31):
            writer.write(
                {
                    "version": version,
                    "mode": "inproc",
                    "verified": "identity",
                    "bytes_moved": 0,
                    "seconds": {"canary": 0.0004, "total": 0.001},
                    "engines": ["boot-1"],
                }
            )
    with JsonlWriter(directory / "samples.jsonl") as writer:
        for when, version, reward in (("before_rl", 10, 0.0), ("after", 30, 1.0), ("step 20", 20, 0.5)):
            turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": attack}]
            row = {"when": when, "version": version, "task": f"sum-{attack}", "messages": turns, "reward": reward}
            writer.write(row)
    return directory


class Elements(HTMLParser):
    """What a browser would see: every element with its attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem != "script":
            self.text += data


def page_of(run_dir: Path) -> Elements:
    return Elements(write_report(run_dir).read_text(encoding="utf-8"))


def printed(run_dir: Path, status: dict, **more: bool) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(closing_text(run_dir, status, **more))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_says_the_verdict_with_its_numbers_and_what_it_leaves_open(tmp_path):
    text = page_of(make_run(tmp_path / "run")).text
    assert "Improved: held-out accuracy rose from 11.0 % before RL to 97.0 % after it." in text
    assert "Difference +86.0 points; 95 % interval +81.6 to +89.8 points, paired over 256 tasks." in text
    assert "It does not say how good the model is at anything else" in text
    for part in ("nothing to learn", "inproc", "21 of 21", "generate", "spec.toml", "before RL", "reward 1"):
        assert part in text
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_cannot_write_markup_into_the_report(tmp_path):
    failed = {**IMPROVED, "state": "failed", "name": ATTACK, "verdict": ATTACK, "recipe": ATTACK, "error": ATTACK}
    page = page_of(make_run(tmp_path / "run", failed, attack=ATTACK))
    assert not [tag for tag, _ in page.tags if tag in {"iframe", "object", "link", "base", "form"}]
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 3  # the charts' data, uPlot and our own
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert [attributes["src"][:22] for tag, attributes in page.tags if tag == "img"] == ["data:image/png;base64,"]
    assert page.text.count("<script>alert(1)</script>") >= 5  # shown as text: name, error, sample, spec, log
    assert "{{ 7 * 7 }}" in page.text


def test_the_report_asks_for_nothing_outside_itself(tmp_path):
    html = re.sub(r"base64,[A-Za-z0-9+/=]+", "", write_report(make_run(tmp_path / "run")).read_text())
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    assert "default-src 'none'" in html


def test_half_a_surrogate_pair_in_a_sample_does_not_stop_the_report(tmp_path):
    run = make_run(tmp_path / "run", attack="ok")
    with JsonlWriter(run / "samples.jsonl") as writer:
        writer.write({"when": "after", "task": "t", "messages": [{"role": "assistant", "content": "a\ud800b"}]})
    assert "a?b" in page_of(run).text


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "running", "steps_done": 7, "steps_total": 30}, "Still running: 7 of 30 steps done."),
        ({"state": "failed", "steps_done": 7, "steps_total": 30, "error": "Starved: 256"}, "Failed: 7 of 30"),
        ({"state": "cancelled", "eval": {"before": None}}, "Cancelled: 0 of ? steps done."),
        ({"state": "succeeded", "steps_done": 3}, "It was not evaluated"),
        ({}, "State unknown"),
    ],
)
def test_a_run_in_any_state_has_a_report_and_a_closing_text(tmp_path, status, said):
    run = make_run(tmp_path / "run", {**status, "recipe": "rl"})
    text = page_of(run).text
    assert said in text
    assert str(status.get("error", "")) in text
    assert said in printed(run, status)


@pytest.mark.parametrize(
    ("stdout", "stderr", "told"), [(True, True, False), (False, True, True), (True, False, True), (False, False, True)]
)
def test_the_reason_of_a_failed_run_is_in_the_closing_text_unless_one_terminal_shows_stderr_too(
    tmp_path, monkeypatch, stdout, stderr, told
):
    status = {"state": "failed", "steps_done": 7, "steps_total": 30, "error": "Starved: 256"}
    run = make_run(tmp_path / "run", {**status, "recipe": "rl"})
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: stdout))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: stderr))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(recipes._closing(run, status))
    assert ("Starved: 256" in console.file.getvalue()) is told  # type: ignore[attr-defined]


def test_a_directory_with_only_a_spec_has_a_report_and_an_empty_one_is_refused(tmp_path):
    (tmp_path / "spec.toml").write_text("")
    assert "State unknown" in page_of(tmp_path).text
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="not a run directory"):
        write_report(tmp_path / "empty")


def test_an_sft_run_is_reported_by_its_loss(tmp_path):
    status = {
        "state": "succeeded",
        "verdict": "improved",
        "recipe": "sft",
        "name": "sft",
        "eval": {
            "metric": "loss",
            "before": 3.4,
            "after": 0.41,
            "interval": [-3.1, -2.9],
            "confidence": 0.95,
            "tasks": 64,
        },
    }
    assert headline(status) == "Improved: held-out loss fell from 3.400 before training to 0.410 after it."
    assert evidence(status) == ("Difference −2.990; 95 % interval −3.100 to −2.900, paired over 64 conversations.")
    assert "0.410" in page_of(make_run(tmp_path / "run", status)).text


REWARD_EVAL = {
    "metric": "reward", "before_rl": -19.25, "after": -3.5, "interval": [12.0, 18.5], "confidence": 0.95, "tasks": 64,
}  # fmt: skip


def test_a_reward_is_told_on_its_own_scale_and_never_in_percent(tmp_path):
    status = {**IMPROVED, "eval": REWARD_EVAL}
    assert headline(status) == "Improved: held-out reward rose from -19.25 before RL to -3.5 after it."
    assert evidence(status) == "Difference +15.750; 95 % interval +12.000 to +18.500, paired over 64 tasks."
    page = page_of(make_run(tmp_path / "run", status))
    assert "-19.25" in page.text
    assert "accuracy" not in page.text
    widths = [
        float(width)
        for _, attributes in page.tags
        for width in re.findall(r"^width: (-?[\d.]+)", attributes.get("style") or "")
    ]
    assert widths
    assert all(0 <= width <= 100 for width in widths)
    shown = printed(tmp_path / "run", status)
    assert "-19.25" in shown
    assert "accuracy" not in shown


def test_a_loss_that_fell_by_less_than_three_places_show_is_told_with_more():
    judged = {"metric": "loss", "before": 4.08001, "after": 4.07998, "interval": [-4e-5, -2e-5], "tasks": 8}
    status = {"state": "succeeded", "verdict": "improved", "recipe": "sft", "eval": judged}
    assert headline(status) == "Improved: held-out loss fell from 4.08001 before training to 4.07998 after it."
    assert evidence(status) == "Difference −3e−05; interval −4e−05 to −2e−05, paired over 8 conversations."


def test_undecided_is_said_with_its_reason_wherever_a_verdict_is(tmp_path):
    judged = {**RL_EVAL, "after": 0.12, "interval": [-0.2, 0.4], "tasks": 5, "why": "5 are too few"}
    status = {**IMPROVED, "verdict": "undecided", "eval": judged}
    assert headline(status) == "Undecided: held-out accuracy rose from 11.0 % before RL to 12.0 % after it."
    assert caveat(status).startswith("These 5 tasks cannot show whether")
    way_out = "Hold out more (eval.tasks; with questions of your own, params.data.eval_share)."
    assert f"stayed the same: 5 are too few. {way_out}" in caveat(status)
    page = page_of(make_run(tmp_path / "run", status))
    assert "Undecided: held-out" in page.text
    assert "5 are too few" in page.text
    assert "5 are too few" in printed(tmp_path / "run", status)


def test_unchanged_never_claims_that_the_two_are_equal():
    status = {**IMPROVED, "verdict": "unchanged", "eval": {**RL_EVAL, "after": 0.12, "interval": [-0.02, 0.04]}}
    assert headline(status) == "Unchanged: held-out accuracy was 11.0 % before RL and 12.0 % after it."
    assert "does not prove that both are equal" in caveat(status)


def test_evaluations_come_in_order_and_keep_their_names(tmp_path):
    found = evaluations(read_history(make_run(tmp_path / "run")))
    assert [(item.label, item.step, item.value, item.is_final) for item in found] == [
        ("before training", 0, 0.0, False),
        ("after the warm-up, before RL", 10, 0.11, False),
        ("after step 20", 20, 0.5, False),
        ("after RL", 30, 0.97, True),
    ]


def test_the_time_is_shared_out_completely_and_drops_are_counted_by_reason(tmp_path):
    history = read_history(make_run(tmp_path / "run"))
    seconds = {part.label: round(part.seconds, 6) for part in timing(history)}
    assert seconds == {"generate": 6.0, "train": 2.0, "other": 3.0}
    assert sum(part.share for part in timing(history)) == pytest.approx(1.0)
    assert drops(history) == {"nothing to learn": 40, "raised": 20}


def test_the_closing_text_ends_with_three_commands_that_fit_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    run = make_run(tmp_path / "run")
    (run / "export").mkdir()
    write_report(run)
    text = printed(run, json.loads((run / "status.json").read_text()))
    assert "Improved: held-out accuracy rose from 11.0 %" in text
    assert "mean reward by RL step" in text
    assert "report.html" in text
    commands = [line.split("   ")[0].strip() for line in text.splitlines() if line.startswith("  tandem ")]
    assert commands == [f"tandem chat {run}", f"tandem serve {run}", "tandem env new my_env"]
    assert f"tandem export {run} --gguf q8_0" in printed(run, {**IMPROVED, "recipe": "sft"})
    (run / "export" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    assert "--gguf" not in printed(run, {**IMPROVED, "recipe": "sft"})
    text = printed(run, {**IMPROVED, "recipe": "sft"}, needs_vllm=True)
    assert f"tandem serve {run} --engine vllm" in text
    assert "tandem chat" not in text
    (run / "export" / "config.json").unlink()
    (run / "export").rmdir()
    assert f"tandem env try {run}/spec.toml" in printed(run, {**IMPROVED, "recipe": "rl", "state": "failed"})
    assert "env try" not in printed(run, {**IMPROVED, "recipe": "sft", "state": "failed"})


def test_where_the_shell_does_not_find_tandem_the_commands_say_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    run = make_run(tmp_path / "a run")
    (run / "export").mkdir()
    text = printed(run, json.loads((run / "status.json").read_text()))
    command = next(line.split("   ")[0].strip() for line in text.splitlines() if " chat " in line)
    program, verb, target = shlex.split(command)
    assert Path(program).resolve() == Path(sys.executable).with_name("tandem").resolve()
    assert (verb, target) == ("chat", str(run))


def test_what_a_model_wrote_cannot_steer_the_terminal(tmp_path, capsys):
    with pytest.raises(SystemExit), exits_by_class():
        raise RunError("\x1b]0;owned\x07 [red]x[/red]")
    assert capsys.readouterr().err.startswith("tandem: ]0;owned [red]x[/red]\n")
    with pytest.raises(SystemExit), exits_by_class():
        raise ValueError("\x1b]0;owned\x07 [red]x[/red]")
    assert capsys.readouterr().err.splitlines()[-2] == "ValueError: ]0;owned [red]x[/red]"
    odd = {**IMPROVED, "verdict": "\x1b]0;owned\x07 [red]x[/red]"}
    text = printed(make_run(tmp_path / "run", odd), odd)
    assert "\x1b" not in text
    assert "[red]x[/red]" in text


def test_samples_stand_by_version_and_memory_by_size(tmp_path: Path):
    page = page_of(make_run(tmp_path / "run"))
    samples = page.text.partition("version by version")[2]
    places = [samples.index(when) for when in ("before RL (version 10)", "step 20", "after (version 30)")]
    assert places == sorted(places)
    assert re.search(r"activations\s*3\s*weights\s*0.5\s*measured peak, of the process or on the GPU\s*4.5", page.text)
    empty = tmp_path / "empty"
    make_run(empty)
    (empty / "metrics.jsonl").write_text("")
    assert "Memory" not in page_of(empty).text
