"""Draw architecture.svg from the imports of src/tandem: `python docs/make_architecture.py`.

The layers are those of tests/test_imports.py. A line goes from a part to each part that it imports, unless that part is
one of the four that nearly everything imports (errors, types, spec, protocols). A test compares the picture with the
code.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = ROOT / "src" / "tandem"
EVERYWHERE = {"errors", "types", "spec", "protocols"}
WIDTH, BOX, HEIGHT, ROW = 900, 96, 34, 82


def layers() -> tuple[tuple[str, ...], ...]:
    """LAYERS of tests/test_imports.py, read without importing it."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise SystemExit("tests/test_imports.py: no LAYERS")


def imports() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tandem"):
                names = [f"tandem.{each.name}" for each in node.names] if node.module == "tandem" else [node.module]
                found |= {(part, name.split(".")[1]) for name in names}
    return {(a, b) for a, b in found if a != b}


def draw() -> str:
    rows = [[part for part in row if not part.startswith("__")] for row in layers()]
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(reversed(rows)):
        gap = WIDTH / (len(row) + 1)
        for place, part in enumerate(row, 1):
            at[part] = (gap * place, 40 + number * ROW)
    height = 40 + len(rows) * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>The parts of Tandem by layer, and which imports which</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for a, b in sorted(imports()):
        if a in at and b in at and b not in EVERYWHERE:
            (x1, y1), (x2, y2) = at[a], at[b]
            middle = (y1 + y2) / 2
            lines.append(
                f'<path d="M{x1:.0f} {y1 + HEIGHT / 2:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} '
                f'{y2 - HEIGHT / 2:.0f}" fill="none" stroke="#9db4c0" stroke-width="1"/>'
            )
    for part, (x, y) in sorted(at.items()):
        fill = "#e8eef1" if part in EVERYWHERE else "#d9ece6"
        lines.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" '
            f'fill="{fill}" stroke="#1f6f5c"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="#222">{escape(part)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.exit(0)
