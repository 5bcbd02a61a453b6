"""`tandem env new NAME`: write a template of an environment and a spec that trains on it."""

from __future__ import annotations

import json
import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template

from tandem.env.load import BUILT_IN
from tandem.errors import SpecError


def new_environment(name: str, directory: str | Path = ".") -> list[Path]:
    """Write NAME.py and NAME.toml into an existing directory. Existing files are never changed."""
    _check_name(name)
    directory = Path(directory)
    if not directory.is_dir():
        raise SpecError(f"directory = '{directory}': is not a directory; create it first")
    code, spec = directory / f"{name}.py", directory / f"{name}.toml"
    for path in (code, spec):
        if path.exists() or path.is_symlink():
            raise SpecError(f"name = '{name}': {path} exists already; choose another name, or move it away")
    words = {
        "name": name,
        "class_name": _class_name(name),
        "file": code.as_posix(),
        "spec": spec.as_posix(),
        "path": json.dumps(code.as_posix(), ensure_ascii=False),
    }
    _write(code, "template_environment.txt", words)
    _write(spec, "template_spec.txt", words)
    return [code, spec]


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise SpecError(f"name = '{name}': write small letters, digits and _, as in word_count (at most 40)")
    if name in BUILT_IN:
        raise SpecError(f"name = '{name}': is built in; choose another")
    taken = {*sys.stdlib_module_names, "tandem", "task", "outcome"}  # the last two are imported by the template
    if name in taken or keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)):
        raise SpecError(f"name = '{name}': has another meaning in Python or in Tandem; choose another")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _write(path: Path, template: str, words: dict[str, str]) -> None:
    text = resources.files("tandem.env").joinpath(template).read_text(encoding="utf-8")
    with path.open("x", encoding="utf-8") as file:  # x: fails rather than overwrites
        file.write(Template(text).substitute(words))
