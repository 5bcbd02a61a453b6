"""Tests look at what a caller sees: uses of private names are counted, and may not grow back."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST = 150
"""Each use is a test that a renaming breaks. What is left: vLLM and kernels, whose insides are what is tested."""


PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names that Python's own documentation gives to named tuples and to os."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield `object._name`, "_name" where an attribute is set or read by name, and imports of `_name`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(func=ast.Attribute(attr="setattr" | "getattr") | ast.Name(id="setattr" | "getattr")):
                for each in node.args:
                    match each:
                        case ast.Constant(value=str(text)) if is_private(name := text.rpartition(".")[2]):
                            yield name
                        case _:
                            pass
            case ast.ImportFrom(names=names):
                yield from (each.name for each in names if is_private(each.name))
            case _:
                pass


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine._source.link", ["_source"]),
        ("self._source, cls._made, a.__name__, a.b", []),
        ("patch.setattr(module, '_CHUNK', 3); getattr(a, '_b')", ["_CHUNK", "_b"]),
        ("patch.setattr('tandem.a._b', 3)", ["_b"]),
        ("from a import _b, c, __version__", ["_b"]),
        ("part._replace(name='b')", []),
    ],
)
def test_the_count_sees_every_form_of_private_use(source: str, found: list[str]) -> None:
    assert list(private_uses(ast.parse(source))) == found


def test_tests_use_few_private_names() -> None:
    counts = Counter(
        {
            str(path.relative_to(TESTS)): sum(1 for _ in private_uses(ast.parse(path.read_text(encoding="utf-8"))))
            for path in TESTS.rglob("*.py")
        }
    )
    assert counts.total() < MOST, f"use public behaviour, or give the source a public name: {counts.most_common(5)}"
