"""Who may import whom: docs of the layers are DESIGN 2, and this is what holds them.

Read with `ast`, so an import counts wherever it stands: at the top, in a function, under an `if`. Names under
`if TYPE_CHECKING:` obey the layers too (an annotation is knowledge); they are only no import "at module level".
"""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import tandem

PACKAGE = Path(tandem.__file__).parent

LAYERS = (
    ("errors", "types", "job_types"),
    ("spec",),
    ("protocols", "obs", "io", "ops", "data", "shapes"),
    ("text", "env", "algo", "optim", "model", "bridge", "engine", "providers", "client"),
    ("rollout", "train", "vllm_worker"),
    ("publish",),
    ("loop", "runs", "online"),
    ("serve", "agent"),
    ("dashboard",),
    ("control",),
    ("build",),
    ("recipes",),
    ("assistant",),
    ("cli", "__init__", "__main__"),
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# Within a layer nobody knows another, but for these.
SIDEWAYS = {
    ("obs", "io"),
    ("ops", "protocols"),
    ("__main__", "cli"),
}

# Concrete classes: behind protocols.py, and named by build/ alone; in vLLM's worker processes, by vllm_worker/.
CONCRETE = {"text", "algo", "optim", "model", "bridge", "engine", "train", "providers"}
COMPOSITION_ROOT = "build"

HEAVY = {
    "torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "matplotlib", "vllm", "sqlalchemy",
    "alembic", "psycopg", "mcp",
}  # fmt: skip
LIGHT = (
    "cli/",
    "spec/",
    "runs/",
    "serve/runs.py",
    "providers/",
    "shapes/",
    "client/",
    "agent/",
    "__init__.py",
    "__main__.py",
    "errors.py",
    "types.py",
    "job_types.py",
)

COMES_WITH = {
    "pydantic_core": "pydantic", "starlette": "fastapi", "mcp_types": "mcp", "triton": "torch", "PIL": "pillow",
}  # fmt: skip
BROUGHT = {"vllm", "sky", "wandb", "mlflow", "trackio"}
"""In environments of their own, and the trackers that a user installs."""

TOO_LONG_FILE, TOO_LONG_FUNCTION = 600, 100


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    at_module_level: bool


@pytest.fixture(scope="module", autouse=True)
def without_garbage_collector() -> Iterator[None]:
    """It would visit the kept trees, 700,000 nodes, again and again: parsing takes 3 s with it and 1 s without."""
    was_on = gc.isenabled()
    gc.disable()
    yield
    tree_of.cache_clear()
    if was_on:
        gc.enable()


def imports(package: Path) -> list[Import]:
    return ours() if package == PACKAGE else imports_in(package)


@cache
def ours() -> list[Import]:
    return imports_in(PACKAGE)


def imports_in(package: Path) -> list[Import]:
    return [
        found
        for path in sorted(package.rglob("*.py"))
        for found in _of_file(path, path.relative_to(package).as_posix())
    ]


def _of_file(path: Path, file: str) -> Iterator[Import]:
    package = ["tandem", *Path(file).parts[:-1]]
    root = path.parents[len(Path(file).parts) - 1]

    def is_module(name: str) -> bool:
        target = root.joinpath(*name.split(".")[1:])
        return target.is_dir() or target.with_suffix(".py").exists()

    def walk(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, at_module_level)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) + 1 - child.level] if child.level else []
                module = ".".join([*above, *filter(None, [child.module])])
                # `from tandem import io` names a part as well as `import tandem.io` does.
                for alias in child.names:
                    full = f"{module}.{alias.name}"
                    name = full if module == "tandem" or (module.startswith("tandem.") and is_module(full)) else module
                    yield Import(file, child.lineno, name, at_module_level)
            elif _imports_by_name(child):
                module = child.args[0].value
                yield Import(file, child.lineno, module, at_module_level)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _only_annotates(child)
            yield from walk(child, at_module_level and not inside)

    yield from walk(tree_of(path.read_text(encoding="utf-8")), True)


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def _imports_by_name(node: ast.AST) -> bool:
    """`import_module("tandem.x")`, `__import__("tandem.x")`: with a name that can be read here."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    literal = isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    return called in ("import_module", "__import__") and literal


def _only_annotates(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def part_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def violations(package: Path) -> list[str]:
    """One line for each import that points up or sideways, or at a class that only build/ may name."""
    found: list[str] = []
    for each in imports(package):
        where, importer = f"{each.file}:{each.line} imports {each.module}", part_of(each.file)
        if importer not in LAYER:
            found.append(f"{each.file} is in no layer: give '{importer}' its place in LAYERS")
            continue
        if each.module != "tandem" and not each.module.startswith("tandem."):
            if each.at_module_level and each.file.startswith(LIGHT) and each.module.split(".")[0] in HEAVY:
                found.append(f"{where} at module level")
            continue
        imported = each.module.split(".")[1] if "." in each.module else "__init__"
        if imported not in LAYER:
            imported = "__init__"  # `from tandem import train`: the Python API, at the very top
        if imported == importer:
            continue
        if LAYER[imported] > LAYER[importer]:
            found.append(f"{where}: up")
        elif LAYER[imported] == LAYER[importer] and (importer, imported) not in SIDEWAYS:
            found.append(f"{where}: sideways")
        elif imported in CONCRETE and importer not in (COMPOSITION_ROOT, "vllm_worker"):
            found.append(f"{where}: only {COMPOSITION_ROOT}/ names concrete classes")
    return sorted(set(found))


def test_no_import_points_up_or_sideways():
    assert violations(PACKAGE) == []


def test_every_part_of_the_package_has_a_layer():
    on_disk = {part_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert on_disk - LAYER.keys() == set()


def test_the_page_of_concepts_has_every_layer_in_this_order():
    page = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M))
    told = {part: int(number) for number, row in rows.items() for part in re.findall(r"`(\w+)`", row)}
    order = sorted(told, key=lambda part: told[part])
    ours = {part: LAYER[part] for part in LAYER if not part.startswith("__")}
    assert told.keys() == ours.keys()
    assert [ours[part] for part in order] == sorted(ours.values())


def test_the_reader_sees_the_imports_that_are_there():
    found = imports(PACKAGE)
    lazy = [each for each in found if each.module == "tandem.engine.hf.engine"]
    assert {(each.file, each.at_module_level) for each in lazy} == {("build/standalone_engines.py", False)}
    assert ("protocols.py", "torch", False) in {(e.file, e.module, e.at_module_level) for e in found}
    assert sum(each.module.startswith("tandem.") for each in found) > 200


PLANTED = {
    "upward": (
        "io/atomic_write.py",
        "from tandem.runs.run import Run",
        "io/atomic_write.py:1 imports tandem.runs.run: up",
    ),
    "sideways": (
        "bridge/disk.py",
        "import tandem.engine.hf.engine",
        "bridge/disk.py:1 imports tandem.engine.hf.engine: sideways",
    ),
    "sideways in layer 2": ("io/x.py", "from tandem.obs import live", "io/x.py:1 imports tandem.obs: sideways"),
    "loop and runs": ("loop.py", "from tandem.runs.run import Run", "loop.py:1 imports tandem.runs.run: sideways"),
    "in a function": (
        "engine/pool.py",
        "class A:\n    def f(self):\n        if self:\n            from tandem.bridge import inproc",
        "engine/pool.py:4 imports tandem.bridge: sideways",
    ),
    "for an annotation": (
        "rollout/store.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tandem.serve.http.service import Service",
        "rollout/store.py:3 imports tandem.serve.http.service: up",
    ),
    "relative": ("env/deep/er.py", "from ...text import renderer", "env/deep/er.py:1 imports tandem.text: sideways"),
    "relative to the package": ("io/x.py", "from .. import loop", "io/x.py:1 imports tandem.loop: up"),
    "from the package": ("algo/x.py", "from tandem import model", "algo/x.py:1 imports tandem.model: sideways"),
    "the Python API": ("runs/x.py", "from tandem import write_report", "runs/x.py:1 imports tandem.write_report: up"),
    "by name": (
        "spec/x.py",
        "import importlib\ndef f():\n    importlib.import_module('tandem.loop')",
        "spec/x.py:3 imports tandem.loop: up",
    ),
    "a concrete class outside build/": (
        "recipes/rl.py",
        "def f():\n    from tandem.engine.hf.engine import EmbeddedEngine",
        "recipes/rl.py:2 imports tandem.engine.hf.engine: only build/ names concrete classes",
    ),
    "a concrete class below the recipes": (
        "rollout/x.py",
        "from tandem.text.renderer import Renderer",
        "rollout/x.py:1 imports tandem.text.renderer: only build/ names concrete classes",
    ),
    "torch in a light file": (
        "spec/x.py",
        "try:\n    import torch.nn\nexcept ImportError:\n    pass",
        "spec/x.py:2 imports torch.nn at module level",
    ),
    "a part without a layer": (
        "utils/x.py",
        "import os",
        "utils/x.py is in no layer: give 'utils' its place in LAYERS",
    ),
}


@pytest.mark.parametrize(("file", "text", "violation"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_caught(tmp_path, file, text, violation):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(text, encoding="utf-8")
    assert violations(tmp_path) == [violation]


def test_what_is_allowed_is_not_called_a_violation(tmp_path):
    for part in ("build", "cli"):
        (tmp_path / part).mkdir()
    (tmp_path / "build/training.py").write_text(
        "import torch\nfrom tandem.engine.hf.engine import E\nfrom tandem import io"
    )
    (tmp_path / "cli/main.py").write_text(
        "def f():\n    import torch\n    from tandem import loop\n    from . import recipes"
    )
    (tmp_path / "types.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"
    )
    assert violations(tmp_path) == []


def test_the_light_parts_leave_torch_out_of_the_process():
    """Transitively, and for real: `tandem --help`, a refused spec and a service do not wait for torch."""
    script = (
        "import json, sys; import tandem, tandem.client, tandem.cli.main, tandem.spec.load, tandem.runs.run; "
        "import tandem.recipes; "
        "import tandem.serve.engine.service, tandem.serve.online.service, tandem.serve.rollouts.service; "
        "import tandem.serve.http.run; "
        f"print(json.dumps(sorted({HEAVY!r} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


# --- the loop knows no mode

MODE_WORDS = {"mode", "kind", "backend", "bridge", "name", "algorithm", "lag", "max_lag", "gpus", "replicas", "recipe"}


def questions_about_a_mode(source: str) -> list[str]:
    """Conditions that ask for a mode by its name, by an attribute that says one, or by a Tandem class."""
    found: list[str] = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            test: ast.AST = node.test
        elif isinstance(node, ast.Match):
            test = node
        else:
            continue
        words = {
            each.value for each in ast.walk(test) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        words |= MODE_WORDS & {each.attr for each in ast.walk(test) if isinstance(each, ast.Attribute)}
        words |= MODE_WORDS & {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
        asks_for_a_class = [
            ast.unparse(each.args[1])
            for each in ast.walk(test)
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "isinstance"
        ]
        words |= {
            name for name in asks_for_a_class if not name.endswith(("Error", "ErrorGroup", "Timeout", "ExceptionGroup"))
        }
        if words:
            found.append(f"line {node.lineno}: {sorted(words)}")
    return found


def test_the_loop_asks_no_question_about_a_mode():
    for file in ("loop.py", "publish.py"):
        assert questions_about_a_mode((PACKAGE / file).read_text(encoding="utf-8")) == []
    above = {each.module for each in imports(PACKAGE) if each.file == "loop.py" and each.module.startswith("tandem")}
    assert above == {"tandem.errors", "tandem.protocols", "tandem.publish", "tandem.types"}


@pytest.mark.parametrize(
    "planted",
    [
        "if bridge.mode == 'inproc':\n    pass",
        "x = 1 if max_lag else 2",
        "if isinstance(engine, NullEngine):\n    pass",
        "match spec.sync:\n    case 'shared':\n        pass",
        "while algorithm.name:\n    pass",
    ],
)
def test_a_planted_question_about_a_mode_is_found(planted):
    assert len(questions_about_a_mode(planted)) == 1


# --- sizes


def too_long(package: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) >= TOO_LONG_FILE:
            found.append(f"{path.relative_to(package)}: {lines} lines")
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= TOO_LONG_FUNCTION:
                    found.append(f"{path.relative_to(package)}: {node.name} has {lines} lines")
    return found


def test_files_stay_under_600_lines_and_functions_under_100():
    assert too_long(PACKAGE) == []


def test_a_long_file_and_a_long_function_are_found(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n" * 600)
    (tmp_path / "b.py").write_text("class A:\n    async def f(self):\n" + "        pass\n" * 99)
    assert too_long(tmp_path) == ["a.py: 600 lines", "b.py: f has 100 lines"]


# --- what another engine's environment must have: Python and torch

THEIRS = {"torch", "triton", "vllm", "safetensors"}


def foreign_files(package: Path) -> set[str]:
    """Everything that is loaded from vllm_worker/ on, followed import by import."""
    known = imports(package)
    by_file: dict[str, list[str]] = {}
    for each in known:
        by_file.setdefault(each.file, []).append(each.module)
    here = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    seen, ahead = set[str](), [file for file in here if file.startswith("vllm_worker/")]
    while ahead:
        file = ahead.pop()
        if file in seen:
            continue
        seen.add(file)
        for module in by_file.get(file, []):
            if module.startswith("tandem"):
                path = module.removeprefix("tandem").lstrip(".").replace(".", "/")
                ahead += [name for name in (f"{path}.py", f"{path}/__init__.py") if name in here]
    return seen


def test_what_runs_inside_another_engine_needs_torch_and_the_standard_library_alone():
    foreign = foreign_files(PACKAGE)
    assert {"vllm_worker/weight_sources.py", "bridge/shared/receiver.py", "bridge/shared/memory.py"} <= foreign
    assert not foreign & {f"bridge/{file}.py" for file in ("collective/sender", "files/writer", "shared/sender")}
    needed = {
        each.module.split(".")[0]
        for each in imports(PACKAGE)
        if each.file in foreign and not (each.file == "protocols.py" and not each.at_module_level)
    }
    assert needed - sys.stdlib_module_names - {"tandem"} <= THEIRS
    ours = {file for file in foreign if not file.startswith(("vllm_worker/", "bridge/"))}
    assert ours <= {
        "errors.py",
        "io/bounded_json.py",
        "io/safetensors_format.py",
        "types.py",
        "job_types.py",
        "protocols.py",
        "spec/__init__.py",
        "spec/bridges.py",
        "ops/__init__.py",
        "ops/batched_launches.py",
        "ops/device_names.py",
        "ops/digest.py",
        "ops/digest_layout.py",
        "ops/digest_triton.py",
        "ops/named_tensors.py",
        "ops/option_report.py",
        "ops/parts.py",
        "ops/phase_timer.py",
        "ops/vllm_token_protocol.py",
    }, ours


def test_every_package_that_is_imported_is_declared_where_it_is_imported():
    """The control plane has what its extras bring, and all else must do without that."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}

    def brought(among: Collection[str]) -> set[str]:
        wanted = [each for extra in among for each in extras[extra]]
        return {re.split(r"[^\w-]", each.lower())[0].replace("-", "_") for each in wanted}

    plane = brought(["", "control", "oidc", "postgres"])
    others = brought(extras.keys() - {"control", "postgres", "docs", "dev"})
    for each in ours():
        name = each.module.partition(".")[0]
        if name not in sys.stdlib_module_names | BROUGHT | {"tandem"}:
            declared = plane if each.file.startswith("control/") else others
            assert COMES_WITH.get(name, name) in declared, f"{each.file}:{each.line} imports {name}: pyproject.toml"
