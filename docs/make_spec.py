"""Write docs/spec.md from the spec's classes: `python docs/make_spec.py`. A test compares the two."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tandem.spec.load import json_schema

Table = dict[str, Any]

HEAD = """\
# Every field of a spec

Written by `python docs/make_spec.py` from the classes in `src/tandem/spec/`; do not edit it here.

A spec is a TOML file. Its first line names the recipe: `recipe = "rl"`, `"sft"` or `"preference"`. Each heading below
is a table. If a table has several kinds, its key `kind` selects one (in `[model]` the key `preset` or `path`, in
`[precision]` the key `weights`), and keys of the other kinds are refused. Tandem also refuses unknown keys, values of
another type or out of range, and settings that the run could not use. It does so before it loads anything, and the
error names the field, the value and what to write instead.

`tandem train SPEC --set train.lr=1e-4` overrides a value. `tandem spec show SPEC` prints a spec with its defaults.
`tandem spec schema` prints the JSON Schema for your editor.
"""


def text() -> str:
    """Return the whole page."""
    schema = json_schema()
    definitions: Table = schema["$defs"]
    parts, shown = [HEAD], dict[str, str]()
    for recipe in ("rl", "sft", "preference"):
        root = definitions[_class(schema["discriminator"]["mapping"][recipe])]
        parts.append(f'## `recipe = "{recipe}"`\n\n{root["description"]}\n')
        parts += _table(root, "", definitions, shown)
    return "\n".join(parts)


def _table(node: Table, path: str, definitions: Table, shown: dict[str, str]) -> list[str]:
    """Return the keys of a table, then the tables inside it. A class is shown once; `shown` maps it to its heading."""
    required = node.get("required", [])
    rows, inner = [], []
    for name, field in sorted(node["properties"].items(), key=lambda item: item[0] not in required):
        classes = [_class(choice["$ref"]) for choice in _choices(field) if "$ref" in choice]
        if not classes:
            if "const" not in field:  # `kind` and `recipe` stand in the heading
                rows.append(f"| `{name}` | {_type(field)} | {_default(field, name in required)} | {_text(field)} |")
            continue
        where = f"{path}.{name}" if path else name
        inner.append(f"### `[{where}]`{'' if name in required else ', may be left out'}\n\n{_text(field)}\n")
        for shown_class in classes:
            member = definitions[shown_class]
            title = f"**{_choice(member)}** " if len(classes) > 1 else ""
            if shown_class in shown:
                inner.append(f"{title}As in `[{shown[shown_class]}]` above.\n")
                continue
            shown[shown_class] = where
            if title or not _text(member).startswith("`["):
                inner.append(textwrap.fill(f"{title}{_text(member)}", 120) + "\n")
            inner += _table(member, where, definitions, shown)
    head = ["| key | type | default | |\n|---|---|---|---|"] if rows else []
    return ["\n".join([*head, *rows]) + "\n", *inner] if rows else inner


def _class(reference: str) -> str:
    return reference.rsplit("/", 1)[-1]


def _choices(field: Table) -> list[Table]:
    return field.get("oneOf") or field.get("anyOf") or [field]


def _choice(member: Table) -> str:
    chosen_by = next(((key, field["const"]) for key, field in member["properties"].items() if "const" in field), None)
    return f'`{chosen_by[0]} = "{chosen_by[1]}"`.' if chosen_by else f"With `{member['required'][0]}`."


def _type(field: Table) -> str:
    if "const" in field:
        return f'`"{field["const"]}"`'
    if "enum" in field:
        return ", ".join(f'`"{value}"`' for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(_type(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    word = {**words, "array": "list", "object": "table"}[field["type"]]
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    return " ".join([word, ", ".join(limits)]).strip()


def _default(field: Table, required: bool) -> str:
    if required:
        return "required"
    return f"`{json.dumps(field.get('default', {}))}`"


def _text(field: Table) -> str:
    return " ".join(field.get("description", "").split())


if __name__ == "__main__":
    Path(__file__).with_name("spec.md").write_text(text(), encoding="utf-8")
