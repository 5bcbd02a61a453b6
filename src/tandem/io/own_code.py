"""Load a user's own function, class or object: `path/to/file.py:name` of a spec, or an object that Python passed in.

Every error names the field of the spec, the file with its line, the function, and how it is called.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tandem.errors import OwnCodeFailed, SpecError, TandemError

OBJECT = "object:"
"""How the name of an object begins, which was passed in from Python: a spec can name it, and no file has it."""


@dataclass(slots=True)
class _Session:
    """What a run shares: the objects that it was given, by their names, and each file's module, run once."""

    objects: Mapping[str, Any]
    modules: dict[str, ModuleType] = field(default_factory=dict[str, ModuleType])


_session: ContextVar[_Session | None] = ContextVar("own_code", default=None)


@contextmanager
def session(objects: Mapping[str, Any] | None = None) -> Generator[None]:
    """Within this block a file's code is run once, whatever number of fields names it, and `objects` can be named."""
    token = _session.set(_Session(objects or {}))
    try:
        yield
    finally:
        _session.reset(token)


def load(where: str, name: str) -> Any:
    """Return what `name` names. `where`: the field of the spec, for errors."""
    if name.startswith(OBJECT):
        return _object(where, name)
    file, wanted = file_of(name), name.rpartition(":")[2]
    module = _module(where, name, file)
    if not hasattr(module, wanted):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        close = difflib.get_close_matches(wanted, own, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise SpecError(f"{where} = '{name}': no '{wanted}' in {file}; {hint}It has: {', '.join(own) or 'nothing'}")
    return getattr(module, wanted)


def says(name: str, attribute: str) -> bool:
    """Return whether the class that `name` names sets this attribute to True in its body. The file is read, and not
    run: False for what only running it would show."""
    if name.startswith(OBJECT):
        return False
    path, wanted = file_of(name), name.rpartition(":")[2]
    try:
        return f"{wanted}.{attribute}" in _set_to_true(path, path.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError):  # a run says what is wrong with the file
        return False


@cache
def _set_to_true(path: Path, _changed_ns: int) -> set[str]:
    """Return class.attribute of what the classes of a file set to True."""
    classes = (each for each in ast.parse(path.read_bytes()).body if isinstance(each, ast.ClassDef))
    lines = ((one.name, each) for one in classes for each in one.body if isinstance(each, ast.Assign | ast.AnnAssign))
    return {
        f"{name}.{target.id}"
        for name, line in lines
        for target in (line.targets if isinstance(line, ast.Assign) else [line.target])
        if isinstance(target, ast.Name) and isinstance(line.value, ast.Constant) and line.value.value is True
    }


def check_call(where: str, name: str, function: Any, call: str, *arguments: str, **named: Any) -> None:
    """Raise SpecError if `function` cannot be called like this. `call`: the same call as text."""
    if not callable(function):
        raise SpecError(f"{where} = '{name}': is {type(function).__name__}, not a function; write def {call}")
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        at = place_of(function)
        raise SpecError(f"{where} = '{name}'{at}: cannot be called as {call}: {error}") from error
    except ValueError:
        return  # a built-in without a signature; the first call tells


@contextmanager
def called(where: str, name: str, call: str) -> Generator[None]:
    """Turn an exception of the user's code into OwnCodeFailed, with its file and line. Tandem's own errors and those
    about memory stay as they are, because something else is done about them."""
    try:
        yield
    except (TandemError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise OwnCodeFailed(f"{where} = '{name}': {_raised(error, name)}; it was called as {call}") from error


def import_file(path: Path) -> ModuleType:
    """Run a file as a module. Its name is unique, so that a file called random.py hides no module; dataclasses look it
    up in sys.modules."""
    unique = f"tandem_own_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec, "a .py file always has a loader"
    assert spec.loader, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return module


def place_of(value: Any) -> str:
    """Return " (file:line)" of a function's or class's definition; empty if it has none."""
    try:
        value = inspect.unwrap(value)
        lines = inspect.getsourcelines(value)
        return f" ({inspect.getsourcefile(value)}:{lines[1]})"
    except (OSError, TypeError):
        return ""


def short(name: str) -> str:
    """Return a name without its directories, for people and for file names."""
    return name.removeprefix(OBJECT).rpartition("/")[2]


def file_of(name: str) -> Path:
    """Return the file of `file.py:name` or `file.py`."""
    return Path(name if name.endswith(".py") else name.rpartition(":")[0])


def sha256_of(name: str) -> str:
    """Return the SHA-256 of the file, or of the object's source; empty if there is none."""
    if name.startswith(OBJECT):
        return _source_digest(_object("object", name))
    try:
        return hashlib.sha256(file_of(name).read_bytes()).hexdigest()
    except OSError:
        return ""


def object_name(value: Any) -> str:
    """Return the name under which a spec keeps an object: its own qualified name, or its class's."""
    kind = cast("Any", type(value))
    named = value if hasattr(value, "__qualname__") else getattr(value, "loss", kind)
    return f"{OBJECT}{named.__module__}.{getattr(named, '__qualname__', kind.__qualname__)}"


def _object(where: str, name: str) -> Any:
    current = _session.get()
    if current is None or name not in current.objects:
        raise SpecError(
            f"{where} = '{name}': was an object of Python, which a spec alone does not have; call tandem.resume(DIR, "
            "...) with the same object, or put it into a file and name it by path (file.py:name)"
        )
    return current.objects[name]


def _source_digest(value: Any) -> str:
    """Of a function, a class, an instance's class, or the functions that an object holds (an Algorithm)."""
    parts: list[Any] = [value] if hasattr(value, "__qualname__") else [type(value), *_functions_in(value)]
    found = hashlib.sha256()
    for part in parts:
        try:
            found.update(inspect.getsource(part).encode())
        except (OSError, TypeError):
            return ""  # typed at a prompt: there is no source
    return found.hexdigest()


def _functions_in(value: Any) -> list[Any]:
    kind = cast("Any", type(value))
    names = sorted(getattr(kind, "__dataclass_fields__", {}))
    return [each for name in names if inspect.isfunction(each := getattr(value, name))]


def _module(where: str, name: str, path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise SpecError(
            f"{where} = '{name}': no such file, neither beside the spec nor in {Path.cwd()}; write its path, as in "
            "mine.py:name"
        )
    current = _session.get()
    modules = current.modules if current is not None else {}
    if str(path) not in modules:
        try:
            modules[str(path)] = import_file(path)
        except TandemError:
            raise
        except Exception as error:
            raise SpecError(f"{where} = '{name}': importing the file failed: {_raised(error, name)}") from error
    return modules[str(path)]


def _raised(error: Exception, name: str) -> str:
    """Say what was raised, and the innermost line of the user's own file."""
    if isinstance(error, SyntaxError):
        return f"raised {type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file_of(name).absolute())]
    at = (own or [frame for frame in frames if frame.filename != __file__] or frames)[-1]
    return f"raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}, in {at.name})"
