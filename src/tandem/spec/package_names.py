"""Names and versions of environment packages: `acme/shout==1.2.0`, whose distribution is `acme-shout`.

A distribution's name is normalised as PEP 503 says, so that `Acme_Shout` and `acme-shout` are one name. Names that look
alike have one skeleton: an index holds one of them only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tandem.errors import SpecError

_PACKAGE = re.compile(r"(?P<org>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,58}[A-Za-z0-9])?)/"
                      r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,58}[A-Za-z0-9])?)"
                      r"(?:==(?P<version>[^=\s]{1,60}))?")  # fmt: skip
_VERSION = re.compile(
    r"(?P<release>[0-9]{1,8}(?:\.[0-9]{1,8}){0,5})(?:(?P<pre>a|b|rc)(?P<pre_n>[0-9]{1,8}))?"
    r"(?:\.post(?P<post>[0-9]{1,8}))?(?:\.dev(?P<dev>[0-9]{1,8}))?"
)
_LAST = 10**9
_ALIKE = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s"})
_PAIRS = (("rn", "m"), ("vv", "w"), ("cl", "d"))


@dataclass(frozen=True, slots=True)
class PackageName:
    """What a spec or a command names. `version`: empty: the newest."""

    org: str
    name: str
    version: str = ""

    @property
    def title(self) -> str:
        return f"{self.org}/{self.name}"

    @property
    def distribution(self) -> str:
        """The name under which pip and uv install it."""
        return normalized(f"{self.org}-{self.name}")

    @property
    def prefix(self) -> str:
        """How the names of all distributions of its org begin."""
        return f"{normalized(self.org)}-"


def is_package(text: str) -> bool:
    """Return whether this names a package, and no file, module or adapter."""
    return not text.endswith(".py") and _PACKAGE.fullmatch(text) is not None


def package_name(text: str) -> PackageName:
    """Read `ORG/NAME` or `ORG/NAME==VERSION`. SpecError if it is neither."""
    found = _PACKAGE.fullmatch(text)
    if found is None:
        raise SpecError(f"'{text:.100}': write ORG/NAME or ORG/NAME==VERSION, as in acme/shout==1.2.0")
    version = found["version"] or ""
    if version:
        version_key(version)
    return PackageName(found["org"], found["name"], version)


def normalized(name: str) -> str:
    """Return what PEP 503 makes of a name: small letters, and one `-` for each run of `-`, `_`, `.` and blanks."""
    return re.sub(r"[-_. ]+", "-", name).lower()


def skeleton(name: str) -> str:
    """Return what is left of a name for an eye that takes 0 for o and 1 for l, and overlooks a hyphen."""
    found = normalized(name).replace("-", "").translate(_ALIKE)
    for pair, one in _PAIRS:
        found = found.replace(pair, one)
    return found


def version_key(version: str) -> tuple[tuple[int, ...], tuple[int, int], int, int]:
    """Return what sorts versions as PEP 440 does; equal versions have equal keys. SpecError for other spellings than
    the normal one: no `v`, no epoch, no local part."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise SpecError(f"version '{version:.60}': write it in its normal form, as in 1.2.0, 1.2.0rc1 or 1.2.0.post1")
    release = [int(part) for part in found["release"].split(".")]
    while len(release) > 1 and not release[-1]:
        release.pop()
    dev = int(found["dev"]) if found["dev"] else _LAST
    if found["pre"]:
        pre = ("a", "b", "rc").index(found["pre"]), int(found["pre_n"])
    else:  # a development version alone comes before the first alpha
        pre = (-1, 0) if found["dev"] and not found["post"] else (3, 0)
    return tuple(release), pre, int(found["post"]) if found["post"] else -1, dev


def newest(versions: Collection[str]) -> str:
    """Return the newest that is neither a pre-release nor a development version; if there is none, the newest."""
    found = {each: _VERSION.fullmatch(each) for each in versions}
    final = [each for each, parts in found.items() if parts is not None and not parts["pre"] and not parts["dev"]]
    return max(final or versions, key=version_key)
