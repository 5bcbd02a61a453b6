"""Writes the table in docs/failures.md from the rules: `python docs/make_failures.py`. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from tandem.runs.failure_diagnosis import kinds, rules

PAGE = Path(__file__).with_name("failures.md")
BEGIN, END = "<!-- written by docs/make_failures.py -->\n", "<!-- end -->\n"


def table() -> str:
    lines = ["| class | exit code | tried again | what it means |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {kind.exit_code} | {'yes' if kind.retriable else 'no'} | {kind.about} |"
        for name, kind in kinds().items()
    ]
    lines += ["", "| rule | class | tried again | what to do |", "|---|---|---|---|"]
    lines += [
        f"| `{rule.id}` | `{rule.failure_class}` | {'yes' if rule.retriable else 'no'} | {rule.next} |"
        for rule in rules()
    ]
    return "\n".join([*lines, ""])


def text() -> str:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
