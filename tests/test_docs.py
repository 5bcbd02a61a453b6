"""Docs cannot rot in silence: links, paths, specs, commands and options in them are looked up."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

import tandem
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.spec.load import parse_spec

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
# In backticks, or in a link: src/tandem/loop.py, tests/unit, docs/LOG.md, examples/quickstart.toml,
# train/batch_packing.py.
PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]*)`|`((?:[a-z_]+/)+[a-z_]+\.py)`")
MACHINE = re.compile(r"/(?:work|tmp|root|home)/\w+")


def fenced(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def each(find: str) -> list[tuple[Path, str]]:
    """(page, block) of every fenced block in a language."""
    return [(page, block) for page in PAGES for block in fenced(page, *find.split())]


def ids(pairs: list[tuple[Path, str]]) -> list[str]:
    return [f"{page.name}: {block.strip().splitlines()[0][:50]}" for page, block in pairs]


def test_the_pages_that_a_newcomer_looks_for_are_there():
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    docs = ("concepts", "quickstart", "environments", "algorithms", "data", "serving", "spec", "LOG")
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{name}.md" for name in docs)} <= names


def test_the_readme_begins_with_the_two_commands():
    commands = [line.split("#")[0].strip() for line in fenced(ROOT / "README.md", "sh")[0].splitlines()]
    assert commands == ["make quickstart", "make test"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path):
    text = page.read_text()
    for target, _ in LINK.findall(text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: link to {target}"
    for rooted, inside in PATH.findall(text):
        path = ROOT / rooted if rooted else ROOT / "src" / "tandem" / inside
        assert path.exists(), f"{page.name}: path {rooted or inside}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_machine_s_paths(page: Path):
    assert MACHINE.findall(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_a_screen_and_every_fence_is_closed(page: Path):
    text = page.read_text()
    long = [line for line in text.splitlines() if len(line) > 125 and not line.startswith("|") and "](" not in line]
    assert long == [] or page.name in ("serving.md", "environments.md")
    assert text.count("\n```") % 2 == 0 or text.startswith("```")


# --- words

OBSCURE = re.compile(r"\b(whoever|nobody|somebody|anew)\b", re.IGNORECASE)
"""Words that hide the actor: write the trainer, the engine, the worker, the caller, the client, again."""

WRITTEN = [
    *(path for path in sorted((ROOT / "src").rglob("*")) if path.is_file() and "__pycache__" not in path.parts),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "examples").glob("*.*")),
]


def obscure_words(text: str) -> list[str]:
    """Return "line: word" for each."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{number}: {word}" for number, line in lines for word in OBSCURE.findall(line)]


def test_source_and_docs_name_the_actor():
    found = {path: obscure_words(path.read_text(encoding="utf-8", errors="replace")) for path in WRITTEN}
    assert {str(path.relative_to(ROOT)): words for path, words in found.items() if words} == {}


def test_no_help_text_hides_the_actor():
    helps = {name: CliRunner().invoke(app, [*name, "--help"]).output for name in command_names(APP)}
    assert ("sync", "audit") in helps
    assert {name: obscure_words(text) for name, text in helps.items() if obscure_words(text)} == {}


def test_an_obscure_word_would_be_seen():
    assert obscure_words("Whoever asks\nis told anew; a newcomer") == ["1: Whoever", "2: anew"]


# --- specs

# What completes a fragment (a spec without its `recipe`), so that every table in it is checked.
RL_REST = {
    "recipe": "rl",
    "model": {"preset": "tiny"},
    "environment": {"name": "sort"},
    "train": {"steps": 8, "lr": 1e-4, "groups_per_step": 2, "group_size": 2},
}
SFT_REST = {
    "recipe": "sft",
    "model": {"preset": "tiny"},
    "data": {"kind": "file", "path": "a.jsonl"},
    "train": {"steps": 8, "lr": 1e-4},
}
SPECS = each("toml")


def completed(raw: dict[str, object]) -> dict[str, object]:
    if "recipe" in raw:
        return raw
    return {**(SFT_REST if "data" in raw else RL_REST), **raw}


@pytest.mark.parametrize(("page", "block"), SPECS, ids=ids(SPECS))
def test_every_spec_in_the_docs_loads(page: Path, block: str):
    assert parse_spec(completed(tomllib.loads(block))).recipe in ("rl", "sft", "preference")


def test_there_are_specs_in_the_docs_whole_and_in_part_and_a_wrong_one_would_be_seen():
    whole = ["recipe" in tomllib.loads(block) for _, block in SPECS]
    assert True in whole
    assert False in whole
    with pytest.raises(SpecError):
        parse_spec(completed(tomllib.loads(SPECS[0][1] + "\n[sync]\nbrigde = 'inproc'\n")))


def test_the_readme_s_own_spec_is_fifteen_lines_or_fewer_of_substance():
    (block,) = fenced(ROOT / "README.md", "toml")
    assert 10 <= sum(bool(line.strip()) for line in block.splitlines()) <= 15


# --- commands

APP: Any = typer.main.get_command(app)


def command_names(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every group and command, as the words behind `tandem`."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from command_names(inner, (*path, name))


def command_lines(text: str) -> Iterator[str]:
    """Every `tandem ...` in shell blocks and in backticks."""
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash"):
            joined = body.replace("\\\n", " ")
            yield from (line.strip() for line in joined.splitlines() if line.strip().startswith("tandem "))
    yield from re.findall(r"`(tandem [^`\n]*)`", FENCE.sub("", text))


def problem(line: str) -> str:
    """Empty if the command and all its options exist."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = APP
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command '{words[0]}'"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in {*known, "--help"}]
    return f"no option {unknown[0]}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_docs_exists_with_its_options(page: Path):
    assert {line: problem(line) for line in command_lines(page.read_text()) if problem(line)} == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tandem train a.toml --set train.lr=1", ""),
        ("tandem serve DIR --port 0 --ready-file F", ""),
        ("tandem env new shout   # a comment --with an option", ""),
        ("tandem trian a.toml", "no command 'trian'"),
        ("tandem env make x", "no command 'make'"),
        ("tandem serve DIR --prot 0", "no option --prot"),
    ],
)
def test_a_command_that_is_not_there_would_be_seen(line: str, expected: str):
    assert problem(line) == expected


def test_commands_are_found_in_the_docs():
    assert sum(len(list(command_lines(page.read_text()))) for page in PAGES) >= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_in_the_docs_exists(page: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^make ((?:[\w-]+ ?)+?)(?:\s*#.*)?$", "\n".join(fenced(page, "sh", "bash")), re.MULTILINE)
    named += re.findall(r"`make ([\w -]+)`", page.read_text())
    assert {target for line in named for target in line.split()} <= targets


# --- python, and the page that is written


PYTHON = each("python")


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=ids(PYTHON))
def test_python_in_the_docs_is_python_and_imports_what_there_is(page: Path, block: str):
    compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for module, names in re.findall(r"^from (tandem[\w.]*) import ([\w, ]+)$", block, re.MULTILINE):
        found = importlib.import_module(module)
        for name in names.split(","):
            there = hasattr(found, name.strip()) or importlib.util.find_spec(f"{module}.{name.strip()}") is not None
            assert there, f"{page.name}: {module}.{name.strip()}"


def maker(name: str) -> Any:
    """A program of docs/."""
    place = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules[name] = module  # its dataclasses ask for it
    place.loader.exec_module(module)
    return module


def test_every_table_of_figures_has_a_picture_of_its_numbers():
    make_pictures = maker("make_pictures")
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text()
    drawn = make_pictures.pictures(page)
    there = {path.stem: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert there == drawn, "run: python docs/make_pictures.py"
    tables = make_pictures.tables(page)
    assert len(tables) > 30
    for table in tables:
        assert re.match(r"<!-- (picture: [\w.-]+|no picture: \w+)", table.asked), (
            f"not drawn, and not why: {table.head}"
        )
        if asked := re.match(r"<!-- picture: ([\w.-]+)", table.asked):
            shape = "curves" if ", curves" in table.asked else "bars"
            assert table.after == f"![The same as {shape}](pictures/{asked[1]}.svg)"
    assert len(drawn) == sum(table.asked.startswith("<!-- picture:") for table in tables), "two of one name"
    for name, picture in drawn.items():
        widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', picture)]
        if places := [float(place) for place in re.findall(r'<circle cx="([\d.]+)"', picture)]:  # of curves
            widths = [max(places) - min(places), *(place - min(places) for place in places)]
        assert max(widths) > 100, name
        assert len(widths) > 1, name
        ElementTree.fromstring(picture)


def test_a_curve_goes_through_the_numbers_of_its_columns():
    page = """<!-- picture: learned, curves | s | tokens -->

| steps | Us: s | Us: tokens | Us: % | Them: s | Them: tokens | Them: % |
|---|---|---|---|---|---|---|
| 0 | 0 | 0 | 5.0 | 0 | 0 | 5.0 |
| 20 | 50 | 1,000 | 40.0 | 100 | 2,000 | 20.0 |
"""
    picture = ElementTree.fromstring(maker("make_pictures").pictures(page)["learned"])
    dots = [
        (float(each.get("cx", "")), float(each.get("cy", ""))) for each in picture.iter() if each.tag.endswith("circle")
    ]
    by_time, by_tokens = dots[:4], dots[4:]
    (left, base), (ours, top), theirs_first, (theirs, lower) = by_time
    assert theirs_first == (left, base)
    assert ours - left == pytest.approx((theirs - left) / 2, abs=0.1), "in half the time"
    assert (base - lower) / (base - top) == pytest.approx(15 / 35, abs=0.01), "20 and 40 %, from 5"
    assert [x for x, _ in by_tokens] == [x for x, _ in by_time]


@pytest.mark.parametrize(
    ("cell", "value", "between"),
    [
        ("**7.98** (7.70 to 8.73)", 7.98, (7.7, 8.73)), ("17.5 to 19.6", 17.5, (17.5, 19.6)), ("≤ 9.5", 9.5, None),
        ("1,292 (1,255 to 1,384)", 1292, (1255, 1384)), ("−0.001", -0.001, None), ("", None, None),
        ("**20.1** (18.5-21.3)", 20.1, (18.5, 21.3)), ("beside the GPU", None, None), ("3.0 % (3 to 4)", 3, (3, 4)),
    ],
)  # fmt: skip
def test_a_cell_is_read_as_it_is_meant(cell: str, value: float | None, between: tuple[float, float] | None):
    make_pictures = maker("make_pictures")
    assert (make_pictures.number(cell), make_pictures.spread(cell)) == (value, between)


def test_the_page_of_every_field_is_as_the_classes_are():
    make_spec = maker("make_spec")
    page = (ROOT / "docs" / "spec.md").read_text()
    assert page == make_spec.text(), "run: python docs/make_spec.py"
    for key in ("max_lag", "eval_share", "spread_floor", "targets", "kv_gib", "confidence"):
        assert f"| `{key}` |" in page


# --- the site


def linked_from(page: Path) -> set[Path]:
    targets = (target for target, _ in LINK.findall(page.read_text()) if not target.startswith(("http://", "https://")))
    return {(page.parent / target).resolve() for target in targets if target.endswith(".md")}


def test_every_page_can_be_reached_from_the_readme_by_links():
    seen, ahead = set[Path](), {ROOT / "README.md"}
    while ahead:
        page = ahead.pop()
        seen.add(page)
        ahead |= linked_from(page) - seen
    assert {page.name for page in PAGES if page not in seen} == set()


def test_the_site_has_every_page_in_its_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().split("nav:", 1)[1]
    listed = set(re.findall(r"([\w-]+)\.md", nav))
    assert listed == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"changelog", "contributing", "security"}


def test_the_page_of_the_python_api_has_every_public_name():
    listed = re.findall(r"^::: tandem\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({*tandem.__all__} - {"__version__"})


def test_the_picture_of_the_architecture_is_of_this_code():
    drawn = maker("make_architecture").draw()
    picture = ROOT / "docs" / "architecture.svg"
    assert picture.read_text() == drawn, "run `python docs/make_architecture.py`"
