"""Find out why a run failed: match its error, or the last output of its process, with failure_rules.toml."""

from __future__ import annotations

import builtins
import re
import signal
import sys
import tomllib
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tandem.errors import EngineError, MissingExtra, ProducerDied, SpecError, SyncError, TandemError
from tandem.obs.claims import printable

RULES = Path(__file__).with_name("failure_rules.toml")
_LONGEST_TEXT = 65536  # characters of a text; the end is kept, because the cause is there

FailureClass = Literal[
    "user", "data", "numerics", "out_of_memory", "infra_retriable", "preempted", "stalled", "unknown"
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of failures."""

    exit_code: int
    retriable: bool
    about: str
    next: str
    """What to do after a Tandem process ended with this exit code, if no rule fits."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    id: str
    failure_class: FailureClass
    next: str
    retriable: bool
    types: frozenset[str] = frozenset()
    text: tuple[re.Pattern[str], ...] = ()
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[str] = frozenset()
    weak: bool = False

    def fits(self, case: Case) -> bool:
        return (
            bool(self.types & case.types)
            or case.exit_code in self.exit_codes
            or case.signal in self.signals
            or any(pattern.search(case.text) for pattern in self.text)
        )


@dataclass(frozen=True, slots=True)
class Case:
    """What is known about one failure."""

    text: str = ""
    types: frozenset[str] = frozenset()
    exit_code: int | None = None
    signal: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified failure; `rule` is empty if none fits."""

    failure_class: FailureClass
    rule: str
    next: str
    retriable: bool
    exit_code: int = field(default=1)

    def row(self) -> dict[str, Any]:
        """Return it as status.json has it."""
        return {
            "class": self.failure_class,
            "rule": self.rule,
            "next": self.next,
            "retriable": self.retriable,
            "exit_code": self.exit_code,
        }


def classify_error(error: BaseException) -> Failure:
    """Classify an exception, with its causes."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return classify_end("", error.code)
    cases = [
        Case(f"{type(link).__name__}: {link}"[-_LONGEST_TEXT:], frozenset(kind.__name__ for kind in type(link).__mro__))
        for link in chain(error)
    ]
    return _classify(cases)


def classify_end(text: str, exit_code: int | None = None, signal_number: int = 0) -> Failure:
    """Classify the end of a process by its last output and its exit code; a negative or large code is a signal."""
    if not signal_number and exit_code is not None:
        signal_number = -exit_code if exit_code < 0 else exit_code - 128 if exit_code > 128 else 0
    text = _WARNINGS.sub("", text[-_LONGEST_TEXT:])
    case = Case(text, _types_in(text), exit_code, _signal_name(signal_number))
    return _classify([case])


@contextmanager
def exits_by_class() -> Generator[None]:
    """Wrap a command: if it fails, print why and what to do next, and exit with the code of the failure's class."""
    try:
        yield
    except Exception as error:  # of any kind; the class of an unknown error is `unknown`
        if interrupted(error):
            raise KeyboardInterrupt from error
        failure = classify_error(error)
        if isinstance(error, TandemError) or told_by_the_system(error):
            print(f"tandem: {printable(told_by_the_system(error) or str(error))}", file=sys.stderr)
        else:
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        if not isinstance(error, SpecError | MissingExtra):  # their text says what to change
            print(f"tandem: {what_to_do(failure.row())}", file=sys.stderr)
        raise SystemExit(failure.exit_code) from error


def what_to_do(row: Mapping[str, Any]) -> str:
    """Return the next step after a failure as a sentence. `row`: as in status.json."""
    rule = f", rule {row['rule']}" if row.get("rule") else ""
    return f"next: {row.get('next')} (failure class {row.get('class')}{rule})"


def told_by_the_system(error: BaseException) -> str:
    """Return file and reason of an error of the operating system; empty for every other error."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    return f"{error.filename}: {error.strerror}"


def interrupted(error: BaseException) -> bool:
    """Return whether Ctrl-C caused the error: some libraries, while imported, turn it into an error of their own."""
    return any(isinstance(link, KeyboardInterrupt) for link in chain(error))


@cache
def kinds() -> dict[FailureClass, Kind]:
    return {_class(name): Kind(**row) for name, row in _table()["class"].items()}


@cache
def rules() -> tuple[FailureRule, ...]:
    return tuple(_rule(row) for row in _table()["rule"])


def _classify(cases: Sequence[Case]) -> Failure:
    """Return the failure by the first rule that fits any case, weak rules last; then by the exit code of a class. An
    unknown failure that code raised is not retried."""
    for rule in sorted(rules(), key=lambda rule: rule.weak):
        if any(rule.fits(case) for case in cases):
            code = kinds()[rule.failure_class].exit_code
            again = rule.retriable and (rule.failure_class != "unknown" or not _raised_by_code(cases))
            return Failure(rule.failure_class, rule.id, rule.next, again, code)
    ended_with = {case.exit_code for case in cases}
    name = _class(next((name for name, kind in kinds().items() if kind.exit_code in ended_with), "unknown"))
    kind = kinds()[name]
    again = kind.retriable and (name != "unknown" or not _raised_by_code(cases))
    return Failure(name, "", kind.next, again, kind.exit_code)


def _raised_by_code(cases: Sequence[Case]) -> bool:
    """Return whether the failure shows an exception that Python code raised, not the system or a process of Tandem.
    Code would raise it again, so there is no retry; a process that ended without one may succeed at the next attempt.
    """
    return any(_of_code(case) for case in cases if not case.types & _OF_THE_SYSTEM)


def _of_code(case: Case) -> bool:
    if case.types & _OURS:
        return bool(case.types - _OURS) and _names_an_exception(case.types)
    return _names_an_exception(case.types) or _FRAME.search(case.text) is not None


def _names_an_exception(types: frozenset[str]) -> bool:
    return "Exception" in types or any(map(_EXCEPTION.search, types))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes; of an exception group, its first error."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = cast("BaseExceptionGroup[BaseException]", link).exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


_EXCEPTION = re.compile(r"(Error|Exception|Fault|Invalid|Warning)$")
_FRAME = re.compile(
    r'^\s*File ".+", line \d+, in ', re.MULTILINE
)  # a traceback's line; faulthandler's dumps have no comma
_OF_THE_SYSTEM = frozenset({"OSError"} | {kind.__name__ for kind in OSError.__subclasses__()})
_OURS = frozenset(
    {
        kind.__name__ for ours in (EngineError, SyncError, ProducerDied) for kind in ours.__mro__
    }  # and their base classes
)
_BASES = [name for name, value in vars(builtins).items() if isinstance(value, type) and name.endswith("Error")]
_WARNINGS = re.compile(r"^.*(?:\bWARNING\b|Warning:).*$\n?", re.MULTILINE)
_TYPE_IN_TEXT = re.compile(r"(?:^|[\s\].(\[])(?:\w+\.)*([A-Z]\w*)(?=:|\s*$)", re.MULTILINE)


def _types_in(text: str) -> frozenset[str]:
    """Return the exception names in a text, as in a traceback's last line: `torch.OutOfMemoryError: ...`. A text does
    not show base classes, but names usually do: `FSTimeoutError` also counts as `TimeoutError`."""
    named = set(_TYPE_IN_TEXT.findall(text))
    return frozenset(named | {base for base in _BASES for name in named if name.endswith(base)})


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(RULES.read_text(encoding="utf-8"))


def _rule(row: dict[str, Any]) -> FailureRule:
    name = _class(row["class"])
    return FailureRule(
        id=row["id"],
        failure_class=name,
        next=row["next"],
        retriable=row.get("retriable", kinds()[name].retriable),
        types=frozenset(row.get("types", ())),
        text=tuple(re.compile(pattern, re.IGNORECASE) for pattern in row.get("text", ())),
        exit_codes=frozenset(row.get("exit_codes", ())),
        signals=frozenset(row.get("signals", ())),
        weak=row.get("weak", False),
    )


def _class(name: str) -> FailureClass:
    assert name in get_args(FailureClass), name
    return cast("FailureClass", name)
