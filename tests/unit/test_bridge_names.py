"""A concrete bridge is named by its own files, its spec and the build: the other parts ask for its traits."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import tandem
from tandem.bridge.collective.sender import AdapterBroadcastBridge, BroadcastBridge
from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge, RestartBridge
from tandem.bridge.inproc import InprocBridge
from tandem.bridge.shared.sender import SharedBridge
from tandem.spec.bridges import BRIDGES, traits_of
from tandem.spec.sync import SyncSpec

PACKAGE = Path(tandem.__file__).parent
THEIR_OWN = ("bridge/", "build/", "spec/bridges.py", "spec/pairing.py", "spec/run.py", "spec/sync.py")
MOST = 5

_CLASS = re.compile(r"(Inproc|Shared|Broadcast|AdapterBroadcast|Adapter|Disk|Restart)(Sync|Bridge|Source|Link)")
_QUOTED = re.compile(rf"'({'|'.join(BRIDGES)})'")
_ALSO_OTHER_THINGS = {"adapter", "disk", "restart"}
"""A kind of weights, a check of `tandem doctor`, what becomes of requests: a bridge where the line speaks of one."""


def named_in(text: str) -> list[int]:
    """The lines that name a concrete bridge in code; docstrings do not count."""
    lines, found, tree = text.splitlines(), set[int](), ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        names = [getattr(node, "id", ""), getattr(node, "attr", "")]
        if isinstance(node, ast.alias):
            names.append(node.name)
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and any(
            _CLASS.fullmatch(name) for name in names if isinstance(name, str)
        ):
            found.add(node.lineno)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            line = lines[node.lineno - 1].lower()
            speaks = re.search(r"\b(bridge|mode)\b", line) is not None
            if node.value in BRIDGES and (speaks or node.value not in _ALSO_OTHER_THINGS):
                found.add(node.lineno)
            if "bridge" in node.value and _QUOTED.search(node.value):
                found.add(node.lineno)
    return sorted(found)


def test_hardly_any_other_place_names_a_concrete_bridge() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = [
        f"{file}:{number}"
        for file, path in files.items()
        if not file.startswith(THEIR_OWN)
        for number in named_in(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST, found


@pytest.mark.parametrize(
    "line",
    [
        'if link["mode"] == "restart": pass',
        'if spec.sync.bridge in ("disk", "adapter"): pass',
        'match name:\n    case "broadcast": pass',
        "isinstance(sync, AdapterSync)",
        "from tandem.bridge.shared.sender import SharedBridge",
        "raise ValueError(f\"sync.bridge = 'disk': {why}\")",
        'rounds = {"inproc": 1}',
    ],
)
def test_a_planted_name_is_counted(line: str) -> None:
    assert len(named_in(line)) == 1


@pytest.mark.parametrize("line", ['carries = "adapter"', 'on_update = "restart"', '"""sync.bridge = \'disk\'"""'])
def test_what_names_no_bridge_is_not_counted(line: str) -> None:
    assert named_in(line) == []


def test_every_bridge_of_the_spec_declares_itself() -> None:
    members = get_args(get_args(SyncSpec)[0])
    assert {member().bridge: member.traits for member in members} == dict(BRIDGES)


@pytest.mark.parametrize(
    "bridge",
    [InprocBridge, SharedBridge, BroadcastBridge, AdapterBridge, AdapterBroadcastBridge, DiskBridge, RestartBridge],
)
def test_a_bridge_carries_what_it_declares(bridge: type) -> None:
    assert BRIDGES[bridge.mode].carries == bridge.carries


def test_a_link_of_no_known_bridge_has_no_traits() -> None:
    for link in ({}, {"mode": None}, {"mode": []}, {"mode": "other"}):
        assert traits_of(link) is None
    assert traits_of({"mode": "disk"}) is BRIDGES["disk"]
