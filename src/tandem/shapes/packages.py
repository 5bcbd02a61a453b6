"""Between a user and the control plane: environments as packages, and their versions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tandem.shapes.base import Answer, Asked
from tandem.shapes.runs import Name

WHEEL_FIELD_BYTES = 8 * 2**20
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
"""The media type of an index in JSON (PEP 691)."""

Line = Annotated[str, StringConstraints(pattern=r"^[ -~]*$", max_length=300)]


class PushBody(Asked):
    """A wheel to keep under its name and version."""

    file: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}\.whl$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the wheel, as its maker has it."""
    wheel: bytes = Field(max_length=WHEEL_FIELD_BYTES, repr=False)
    """In JSON: base 64."""
    project: Name | Literal[""] = ""
    """The only project whose keys and runs see the package; empty: every project of the org. Of a new package only."""
    build: dict[str, Line] = Field(default={}, max_length=20)
    """How the wheel was made, as its maker tells it: tool, commit, machine."""
    checks: dict[str, int | float | bool | Line] = Field(default={}, max_length=60)
    """What its maker measured before the push: the number of tasks, the result of `tandem env check`."""


class YankBody(Asked):
    """A version to take out of what is chosen by default. It is never deleted: who pinned it still gets it."""

    version: str = Field(min_length=1, max_length=60)
    why: Line = ""
    undo: bool = False
    """Put it back."""


class PackageVersionInfo(Answer):
    """One version of a package. Its bytes never change."""

    id: str
    """The distribution's name: what pip and uv install."""
    title: str
    """`ORG/NAME`: what a spec names."""
    version: str
    file: str
    sha256: str
    size: int
    requires_python: str
    summary: str
    environments: dict[str, str]
    """Its entry points: name and `module:Class`."""
    requires: list[str]
    pushed_by: str
    """The id of a key."""
    at: int
    yanked_at: int
    """0: it is not yanked."""
    yanked_why: str


class PackageInfo(Answer):
    """A package and its versions, the oldest first."""

    id: str
    title: str
    project: str
    at: int
    versions: list[PackageVersionInfo]


class PackageList(Answer):
    items: list[PackageInfo]


class IndexFile(Answer):
    """One file of the index, as PEP 691 tells it. Its provenance is at `url` with `.provenance`."""

    filename: str
    url: str
    hashes: dict[str, str]
    yanked: bool | str = False
    """The reason, if it is yanked for one."""


class IndexPage(Answer):
    """All files of one distribution."""

    name: str
    files: list[IndexFile]


class Provenance(Answer):
    """A signed statement (DSSE)."""

    payloadType: str
    payload: str
    signatures: list[dict[str, Any]]
