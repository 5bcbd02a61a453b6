"""Read a control server's index of packages, and check what it gives: bytes, RECORD, names, and the signature.

Everything comes from this one index. What a page says of other places is not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.client import requests
from tandem.errors import ControlError, ControlInvalid, ControlNotKnown, SpecError
from tandem.io.provenance import checked_statement, key_id
from tandem.io.wheel_file import WheelContent, names_in, open_wheel
from tandem.shapes.packages import SIMPLE_JSON, IndexFile, IndexPage, PushBody
from tandem.spec.package_names import PackageName, newest, package_name, version_key

Get = Callable[[str, Mapping[str, str]], bytes]
"""Fetches a path below the index; ControlNotKnown if there is nothing."""


@dataclass(frozen=True, slots=True)
class FetchedWheel:
    """A wheel of the index, checked."""

    content: WheelContent
    wheel: bytes = field(repr=False)
    yanked: bool
    yanked_why: str


@dataclass(frozen=True, slots=True)
class VerifiedPackage:
    """What was checked of one version, and what its provenance says."""

    package: str
    version: str
    file: str
    sha256: str
    files: int
    """As many as RECORD lists; each has the hash that it says."""
    signed_by: str
    """The id of the key: the SHA-256 of its public part."""
    yanked: bool
    provenance: dict[str, Any]

    def row(self) -> dict[str, Any]:
        return asdict(self)


class PackageIndex:
    """`get`: reads below the index of `where`."""

    def __init__(self, get: Get, where: str) -> None:
        self._get, self.where = get, where

    def files(self, distribution: str) -> list[IndexFile]:
        """Return the files of a distribution, the newest version last. ControlNotKnown if the index has none."""
        text = self._get(f"{distribution}/", {"Accept": SIMPLE_JSON})
        try:
            page = IndexPage.model_validate_json(text)
        except ValidationError as error:
            raise ControlError(f"{self.where}: the page of '{distribution}' is not one of an index") from error
        if page.name != distribution:
            raise ControlInvalid(f"{self.where}: the page of '{distribution}' is one of '{page.name:.60}'")
        for each in page.files:
            if names_in(each.filename)[0] != distribution:
                raise ControlInvalid(f"{self.where}: the page of '{distribution}' has the file {each.filename:.100}")
        return sorted(page.files, key=lambda each: version_key(names_in(each.filename)[1]))

    def choose(self, name: PackageName) -> IndexFile:
        """Return the file of the version that is named; otherwise the newest that is neither yanked nor a pre-release.
        SpecError if there is none."""
        try:
            files = self.files(name.distribution)
        except ControlNotKnown:
            raise SpecError(
                f"'{name.title}': {self.where} has no package of this name, or your key may not see it; `tandem env "
                "list --index` lists those that it has"
            ) from None
        if name.version:
            found = [each for each in files if version_key(_version(each)) == version_key(name.version)]
            if not found:
                known = ", ".join(map(_version, files))
                raise SpecError(
                    f"'{name.title}=={name.version}': there is no such version; there are {known or 'none'}"
                )
            return found[0]
        free = {_version(each): each for each in files if each.yanked is False}
        if not free:
            raise SpecError(f"'{name.title}': every version of it was yanked; name one: {name.title}==VERSION")
        return free[newest(free)]

    def fetch(self, file: IndexFile) -> FetchedWheel:
        """Return the file. SpecError unless its bytes have the hash that the index says, and RECORD agrees."""
        distribution, _ = names_in(file.filename)
        wheel = self._get(f"{distribution}/{file.filename}", {})
        self.check_digest(file.filename, wheel, file.hashes.get("sha256", ""))
        why = file.yanked if isinstance(file.yanked, str) else ""
        return FetchedWheel(open_wheel(file.filename, wheel), wheel, file.yanked is not False, why)

    def check_digest(self, file: str, wheel: bytes, sha256: str) -> None:
        if hashlib.sha256(wheel).hexdigest() != sha256:
            raise SpecError(f"{file}: its bytes have not the SHA-256 that {self.where} says; do not use this file")

    def provenance(self, file: str) -> object:
        """Return the envelope of a file, not checked."""
        distribution, _ = names_in(file)
        try:
            return json.loads(self._get(f"{distribution}/{file}.provenance", {}))
        except ValueError:
            raise SpecError(f"{file}: its provenance is no JSON") from None

    def check_provenance(self, fetched: FetchedWheel, signing_key: str) -> dict[str, Any]:
        """Return what the signed provenance says. SpecError if it is not of this key, or not about this wheel."""
        content = fetched.content
        told = checked_statement(self.provenance(content.file), signing_key, content.file, content.sha256)
        same = {
            "version": content.version, "metadata_sha256": content.metadata_sha256,
            "environments": dict(content.environments), "requires": list(content.requires),
        }  # fmt: skip
        for name, value in same.items():
            if told.get(name) != value:
                raise SpecError(
                    f"{content.file}: its provenance says another {name} than the wheel; do not use this file"
                )
        return told

    def verify(self, name: PackageName, signing_key: str) -> VerifiedPackage:
        """Check a version: its bytes, its RECORD, and the signature of its provenance."""
        fetched = self.fetch(self.choose(name))
        told, content = self.check_provenance(fetched, signing_key), fetched.content
        if told.get("package") != package_title(name):
            raise SpecError(f"{content.file}: its provenance is of '{told.get('package')!s:.60}', not of {name.title}")
        return VerifiedPackage(
            name.title, content.version, content.file, content.sha256, len(content.files), key_id(signing_key),
            fetched.yanked, told,
        )  # fmt: skip


def package_title(name: PackageName) -> str:
    """Return `ORG/NAME` as the index writes it."""
    return f"{name.prefix[:-1]}/{name.distribution.removeprefix(name.prefix)}"


def _version(file: IndexFile) -> str:
    return names_in(file.filename)[1]


def push_body(
    wheel: str | Path, project: str, build: Mapping[str, str], checks: Mapping[str, int | float | bool | str]
) -> PushBody:
    """Return the request that pushes a wheel's file, which is checked here as the server checks it."""
    path = Path(wheel)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    checked = open_wheel(path.name, content)
    return requests.body(
        PushBody, file=path.name, sha256=checked.sha256, wheel=content, project=project, build=dict(build),
        checks=dict(checks),
    )  # fmt: skip


def named(name: str) -> PackageName:
    """Read `ORG/NAME==VERSION`, with the version."""
    found = package_name(name)
    if not found.version:
        raise SpecError(f"'{name}': name the version, too, as in {name}==1.2.0")
    return found
