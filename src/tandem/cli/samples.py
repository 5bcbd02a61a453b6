"""`tandem samples`: search the answers that a run trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tandem.cli.options import AsJson, echo
from tandem.cli.remote import RunOrDir
from tandem.runs.named_runs import run_directory

_MOST_CHARACTERS = 600


def samples(
    run: RunOrDir,
    step: Annotated[str, typer.Option(metavar="N or N-M", help="Only of this step, or of these. Default: all.")] = "",
    min_reward: Annotated[float | None, typer.Option(help="Only with at least this reward. Default: all.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only with at most this reward. Default: all.")] = None,
    grep: Annotated[
        str, typer.Option(metavar="TEXT", help="Only where prompt or answer contains this text, in any case.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most samples to print, the newest first; 0: all.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Print answers that a run trained on, with their rewards, the newest first."""
    from tandem.io.kept_samples import samples

    found = samples(
        run_directory(run), steps=_steps(step), min_reward=min_reward, max_reward=max_reward, grep=grep, limit=limit
    )  # fmt: skip
    if as_json:
        return echo(json.dumps(found, indent=2, ensure_ascii=False))
    for each in reversed(found):  # the newest is the last on the screen
        echo(_text(each))
    echo(f"{len(found)} samples" + (f"; --limit {limit} leaves out older ones" if len(found) == limit else ""))


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise typer.BadParameter(f"--step {text}: write one step, such as 30, or the first and the last, such as 20-30")
    return int(first), int(last if dash else first)


def _text(row: Mapping[str, Any]) -> str:
    """Return a sample as text. Control characters are removed: an answer must not control the terminal."""
    from tandem.obs.claims import printable
    from tandem.types import text_of

    rewards = ", ".join(f"{name} {value:g}" for name, value in row["rewards"].items())
    version = "unknown" if row["version"] is None or row["version"] < 0 else row["version"]
    head = (
        f"── step {row['step']} · version {version} · group {row['group']} · task {row['task']} · reward "
        f"{'none' if row['reward'] is None else format(row['reward'], 'g')}{f' ({rewards})' if rewards else ''} · "
        f"{row['tokens']} tokens, {'cut off' if row['finish'] == 'length' else 'ended'} · mean logprob "
        f"{row['logprob'] or 0.0:.3f}"
    )
    turns = [f"{turn.get('role', '?')}: {_cut(text_of(turn.get('content')))}" for turn in row["messages"]]
    return "\n".join(printable(line) for text in (head, *turns) for line in text.split("\n"))


def _cut(text: str) -> str:
    left_out = len(text) - _MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:_MOST_CHARACTERS]} … {left_out:,} characters more (--json)"
