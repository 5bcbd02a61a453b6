"""Loading an environment by name, and the errors when that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.env.load import BUILT_IN, load_environment
from tandem.errors import EnvironmentFailed, SpecError

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
from tandem.types import Outcome, Task

@dataclass(frozen=True)
class Mine:
    size: int = 3
    share: float = 0.5
    names: tuple[str, ...] = ("a",)

    def tasks(self, split):
        return [Task(f"{split}-{i}", ({"role": "user", "content": "hi"},)) for i in range(self.size)]

    async def run(self, task, chat):
        return Outcome(1.0)
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_give_their_class(name):
    assert type(load_environment(name)) is BUILT_IN[name]


def test_parameters_reach_the_class():
    assert load_environment("sort", {"letters": 7}).letters == 7  # type: ignore[attr-defined]


def test_a_file_alone_gives_its_only_environment(good):
    assert len(load_environment(str(good), {"size": 5}).tasks("train")) == 5


def test_a_file_and_a_class_name_give_that_class(good):
    good.write_text(GOOD + "\n\nclass Other(Mine):\n    pass\n")
    assert type(load_environment(f"{good}:Other")).__name__ == "Other"


def test_a_module_and_a_class_name_give_that_class(good, monkeypatch):
    package = good.parent / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "envs.py").write_text(GOOD)
    monkeypatch.syspath_prepend(good.parent)
    assert type(load_environment("some_package.envs:Mine")).__name__ == "Mine"


def test_an_array_of_toml_fits_a_tuple_and_a_whole_number_fits_a_float(good):
    assert load_environment(str(good), {"names": ["x", "y"], "share": 1})


def test_a_class_without_annotations_can_be_used(good):
    good.write_text(GOOD.replace("@dataclass(frozen=True)\n", "").replace("    size: int = 3\n", ""))
    with good.open("a") as file:
        file.write("\n    def __init__(self, size, **rest):\n        self.size = size\n")
    assert len(load_environment(str(good), {"size": 4, "anything": True}).tasks("eval")) == 4
    with pytest.raises(SpecError, match=r"environment\.params\.size: is missing"):
        load_environment(str(good))


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("srot", {}, "environment.name = 'srot': unknown; did you mean 'sort'?"),
        ("nothing like it", {}, "Built in: arithmetic, count, guess, sort"),
        ("sort", {"leters": 7}, "environment.params.leters = 7: unknown to 'sort'; did you mean 'letters'?"),
        ("sort", {"zzz": 7}, "Known: letters, demo_right"),
        ("sort", {"letters": "five"}, 'environment.params.letters = "five": must be a whole number'),
        ("sort", {"letters": True}, "environment.params.letters = true"),
        ("sort", {"letters": 2.5}, "environment.params.letters = 2.5"),
        ("arithmetic", {"operation": "/"}, "environment.params.operation"),
        ("no/such/file.py", {}, "no such file in"),
        ("no/such/file.py:Mine", {}, "`tandem env new file`"),
        ("no_such_package.module:Mine", {}, "no module 'no_such_package'; install its package"),
        ("tandem.no_such_module:Mine", {}, "no module 'tandem.no_such_module'"),
        ("tandem.types:Nothing", {}, "no class 'Nothing' in it; its environments: none"),
        ("tandem.types:Task", {}, "'Task' is not a class with tasks and run"),
        (":Mine", {}, "unknown"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused_with_the_way_out(name, params, said):
    with pytest.raises(SpecError) as error:
        load_environment(name, params)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    def tasks(self, split):", "    def other(self, split):", "no class in it has tasks and run"),
        ("    def tasks(self, split):", "    def tasks(self):", "tasks cannot be called as tasks(split)"),
        ("    async def run(", "    def run(", "run is not async"),
        ("run(self, task, chat)", "run(self, task)", "run cannot be called as run(task, chat)"),
        ("range(self.size)]", "range(0)]", "tasks('train') is empty"),
        ("range(self.size)]", "range(self.size * (split == 'train'))]", "tasks('eval') is empty"),
        ('f"{split}-{i}"', 'f"{i}"', "task id '0' is in 'train' and in 'eval'"),
        ('f"{split}-{i}"', 'f"{split}"', "task id 'train' is twice in 'train'"),
        ('f"{split}-{i}"', "(split, i)", "its id must be a text"),
        ('({"role": "user", "content": "hi"},)', "()", "messages = ()"),
        ('({"role": "user", "content": "hi"},)', '"hi"', "messages = 'hi'"),
        ('({"role": "user", "content": "hi"},)', '({"content": "hi"},)', "messages = ({'content': 'hi'},)"),
        ('"hi"},))', '"hi"},), "42")', "task 'train-0': payload = '42'; write a dict, as in"),
        ("        return [Task(", "        return iter([]) if 1 else [Task(", "returned list_iterator"),
        ("        return [Task(", "        return [5] if 1 else [Task(", "tasks('train') holds 5"),
        ("    size: int = 3", "    demonstrate = 3\n    size: int = 3", "no method demonstrate(task, rng)"),
    ],
)
def test_what_is_not_an_environment_is_refused_by_what_it_lacks(good, old, new, said):
    assert old in GOOD
    good.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SpecError) as error:
        load_environment(str(good))
    assert f"environment.name = '{good}'" in str(error.value)
    assert said in str(error.value)


def test_two_environments_in_a_file_must_be_told_apart(good):
    good.write_text(GOOD + "\n\nclass Other(Mine):\n    pass\n")
    with pytest.raises(SpecError, match=f"choose one: {good}:Mine, {good}:Other"):
        load_environment(str(good))


def test_an_imported_environment_is_not_counted(good):
    good.write_text(GOOD.replace("from dataclasses", "from tandem.env.builtin.sort import Sort\nfrom dataclasses"))
    assert type(load_environment(str(good))).__name__ == "Mine"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_dependency", "importing it raised ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("1 / 0", "importing it raised ZeroDivisionError"),
        ("def broken(:", "importing it raised SyntaxError"),
        (GOOD + "\n    def __post_init__(self):\n        raise OSError('full')\n", "Mine(...) raised OSError: full"),
        (GOOD.replace("        return [Task(", "        1 / 0\n        return [Task("), "tasks('train') raised"),
    ],
)
def test_what_somebody_elses_code_raises_is_named_with_its_line(good, code, said):
    good.write_text(code)
    with pytest.raises(EnvironmentFailed) as error:
        load_environment(str(good))
    assert said in str(error.value)
    assert f"({good}:" in str(error.value)


def test_a_module_that_lacks_a_dependency_is_not_taken_for_missing(good, monkeypatch):
    (good.parent / "needs_more.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(good.parent)
    with pytest.raises(EnvironmentFailed, match="No module named 'no_such_dependency'"):
        load_environment("needs_more:Mine")


def test_an_endless_split_is_looked_at_only_so_far(good):
    good.write_text(
        GOOD.replace("        return [Task(", "        return Endless(split)\n        return [Task(")
        + """

class Endless:
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 10**12

    def __getitem__(self, index):
        return Task(f"{self.split}-{index}", ({"role": "user", "content": "hi"},))
"""
    )
    assert len(load_environment(str(good)).tasks("train")) == 10**12


def test_loading_needs_no_torch():
    code = (
        "import sys; from tandem.env.load import load_environment; from tandem.env import human_player, scaffold; "
        "load_environment('sort'); print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_environment_of_the_docs_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "class Capital" in block).split("```")[0]
    (tmp_path / "capital.py").write_text(code)
    environment = load_environment(str(tmp_path / "capital.py"), {"hint": True})
    assert environment.tasks("eval")[0].messages[0]["content"] == "Capital of Kenya? It begins with N."
