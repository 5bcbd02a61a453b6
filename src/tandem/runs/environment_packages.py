"""The packages of environments that a spec names: resolve them, keep them in the run, install them for its workers.

A run keeps the wheels themselves and `pins.json`: each package's version and SHA-256, and the versions of what it needs
of this machine. A resumed run, and one that repeats it, take these and ask no index.

Packages of an org come from its index alone. pip gets their files, with their hashes, and may ask no index at all; so a
package of the same name elsewhere is never looked at. What else a package needs must be installed on the machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from tandem.client.index import PackageIndex, package_title
from tandem.env.installed import InstalledPackages
from tandem.errors import ControlNotKnown, RunError, SpecError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.wheel_file import WheelContent, file_digest, names_in, open_wheel
from tandem.spec.package_names import PackageName, normalized, package_name, version_key

_log = logging.getLogger(__name__)

PINS = "pins.json"
_MOST = 50
_INSTALL_S = 120.0
_CACHE = Path("tandem") / "environments"


def keep_packages(names: Sequence[str], index: PackageIndex, directory: Path, signing_key: str = "") -> None:
    """Resolve packages, and write pins and wheels into a new directory. `signing_key`: of the server, if it is known:
    then the signature of each provenance is checked."""
    with atomic_write.directory(directory) as fresh:
        resolved, environments = _Resolution(index, fresh, signing_key), dict[str, dict[str, str]]()
        for name in dict.fromkeys(names):
            wanted = package_name(name)
            environments[package_title(wanted)] = _environment_pin(wanted, resolved.take(wanted))
        write_pins(fresh, resolved.wheels, resolved.machine, environments, index.where)


def keep_wheel(wheel: Path, directory: Path) -> str:
    """Write pins and wheel of a file that was not pushed yet, to try it; return the name that a spec would have."""
    content = open_wheel(wheel.name, wheel.read_bytes())
    name = f"local/{content.distribution}"
    with atomic_write.directory(directory, durable=False) as fresh:
        shutil.copyfile(wheel, fresh / wheel.name)
        wanted = PackageName("local", content.distribution, content.version)
        write_pins(fresh, {content.distribution: content}, {}, {name: _environment_pin(wanted, content)}, "")
    return name


def write_pins(
    directory: Path,
    wheels: Mapping[str, WheelContent],
    machine: Mapping[str, str],
    environments: Mapping[str, Mapping[str, str]],
    index: str,
) -> None:
    packages = [
        {"name": each.distribution, "version": each.version, "file": each.file, "sha256": each.sha256}
        for _, each in sorted(wheels.items())
    ]
    pins = {
        "index": index, "python": platform.python_version(), "environments": {**environments}, "packages": packages,
        "machine": dict(sorted(machine.items())),
    }  # fmt: skip
    atomic_write.write_json(directory / PINS, pins)


def _environment_pin(wanted: PackageName, content: WheelContent) -> dict[str, str]:
    return {"package": content.distribution, "version": content.version, "place": _place(wanted, content)}


class _Resolution:
    """Packages with all that they need, while they are fetched into `fresh`."""

    def __init__(self, index: PackageIndex, fresh: Path, signing_key: str) -> None:
        self._index, self._fresh, self._signing_key = index, fresh, signing_key
        self.wheels: dict[str, WheelContent] = {}
        """By distribution."""
        self.machine: dict[str, str] = {}
        """The versions of what they need of this machine."""

    def take(self, wanted: PackageName) -> WheelContent:
        """Fetch a package and all that it needs of its org."""
        fetched = self._index.fetch(self._index.choose(wanted))
        content = fetched.content
        if fetched.yanked:
            why = f" ({fetched.yanked_why})" if fetched.yanked_why else ""
            raise SpecError(
                f"'{wanted.title}=={content.version}' was yanked{why}; name another version. A run that has it goes on "
                "with it, and environment.pins = 'RUN/environment' repeats one"
            )
        if self._signing_key:
            self._index.check_provenance(fetched, self._signing_key)
        known = self.wheels.get(content.distribution)
        if known is not None and known.sha256 != content.sha256:
            raise SpecError(
                f"environment: two versions of '{wanted.title}' are needed: {known.version}, {content.version}"
            )
        self.wheels[content.distribution] = content
        if len(self.wheels) > _MOST:
            raise SpecError(f"'{wanted.title}': needs more than {_MOST} packages")
        atomic_write.write_bytes(self._fresh / content.file, fetched.wheel)
        _check_python(content)
        for text in content.requires:
            self._require(text, wanted, content)
        return content

    def _require(self, text: str, wanted: PackageName, content: WheelContent) -> None:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            needs = Requirement(text)
        except InvalidRequirement:
            raise SpecError(f"{content.file}: its requirement '{text[:100]}' is none") from None
        if needs.url:
            raise SpecError(
                f"{content.file}: needs '{text[:100]}' from a place of its own; an index has all that is needed"
            )
        if needs.marker is not None and not needs.marker.evaluate({"extra": ""}):
            return
        name = normalized(needs.name)
        if name.startswith(wanted.prefix):  # of its org: from the index alone, whatever this machine has of that name
            fitting = [each for each in self._versions(name, content) if needs.specifier.contains(each)]
            if not fitting:
                raise SpecError(f"{content.file}: needs '{text[:100]}', and {self._index.where} has no such version")
            known = self.wheels.get(name)
            if known is None:
                newest = max(fitting, key=version_key)
                self.take(PackageName(wanted.prefix[:-1], name.removeprefix(wanted.prefix), newest))
            elif not needs.specifier.contains(known.version, prereleases=True):
                raise SpecError(f"{content.file}: needs '{text[:100]}', and {known.version} is needed by another")
            return
        try:
            there = metadata.version(needs.name)
        except metadata.PackageNotFoundError:
            raise SpecError(
                f"{content.file}: needs '{text[:100]}', which is not installed here; install it. It is not fetched: "
                "what a package needs beyond its org's own packages comes from you"
            ) from None
        if not needs.specifier.contains(there, prereleases=True):
            raise SpecError(f"{content.file}: needs '{text[:100]}', and {there} is installed here")
        self.machine[name] = there

    def _versions(self, distribution: str, content: WheelContent) -> list[str]:
        """Return the versions of a distribution that were not yanked."""
        try:
            files = self._index.files(distribution)
        except ControlNotKnown:
            raise SpecError(
                f"{content.file}: needs '{distribution}', a name of its org, and {self._index.where} has no such "
                "package. It is taken from no other place"
            ) from None
        return [names_in(each.filename)[1] for each in files if each.yanked is False]


def _check_python(content: WheelContent) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(content.requires_python).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        raise SpecError(f"{content.file}: its Requires-Python '{content.requires_python}' is none") from None
    if not fits:
        raise SpecError(
            f"{content.file}: needs Python {content.requires_python}, and this is {platform.python_version()}"
        )


def _place(wanted: PackageName, content: WheelContent) -> str:
    """Return which class the name means: the only one, or the one of the package's own name."""
    places = content.environments
    if len(places) == 1:
        return next(iter(places.values()))
    own = [place for name, place in places.items() if normalized(name) == normalized(wanted.name)]
    if not own:
        raise SpecError(f"{content.file}: has several environments ({', '.join(places)}), and none has its own name")
    return own[0]


# --- what a run has kept


def install_kept(directory: Path, names: Sequence[str]) -> InstalledPackages:
    """Install what `keep_packages` wrote, for workers in a sandbox. SpecError if a wheel is not the pinned one, or if a
    name is not among the pins."""
    pins = _pins(directory)
    wheels = list[WheelContent]()
    for each in cast("list[dict[str, str]]", pins["packages"]):
        wheels.append(_kept_wheel(directory, each))
    _tell_of_changes(pins)
    site = _cache_of(wheels)
    if not site.exists():
        _install(directory, wheels, site)
    _check_site(site, wheels)
    environments = cast("dict[str, dict[str, str]]", pins["environments"])
    places = dict[str, str]()
    for name in names:
        wanted = package_name(name)
        pinned = environments.get(package_title(wanted), {})
        if not pinned or (wanted.version and version_key(wanted.version) != version_key(pinned["version"])):
            kept = ", ".join(f"{title}=={each['version']}" for title, each in environments.items())
            raise SpecError(f"environment.name = '{name}': is not what {directory / PINS} keeps: {kept}")
        places[name] = pinned["place"]
    return InstalledPackages(site, places)


def _pins(directory: Path) -> Mapping[str, Any]:
    try:
        pins = cast("dict[str, Any]", read_json(directory / PINS))
        if not (isinstance(pins["packages"], list) and isinstance(pins["environments"], dict)):
            raise ValueError("not pins")
        return pins
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{directory / PINS}: the pins of the environment's packages cannot be read ({error}); without them it is "
            "not known what this run played"
        ) from None


def _kept_wheel(directory: Path, pin: Mapping[str, str]) -> WheelContent:
    try:
        content = open_wheel(pin["file"], (directory / pin["file"]).read_bytes())
    except OSError as error:
        raise RunError(f"{directory / pin['file']}: the kept wheel cannot be read: {error.strerror}") from None
    if (content.distribution, content.version, content.sha256) != (pin["name"], pin["version"], pin["sha256"]):
        raise RunError(
            f"{directory / pin['file']}: is not the wheel that {PINS} names (sha256 {pin['sha256'][:12]}, found "
            f"{content.sha256[:12]}); it was changed. Put the right one back"
        )
    return content


def _tell_of_changes(pins: Mapping[str, Any]) -> None:
    for name, version in cast("dict[str, str]", pins.get("machine", {})).items():
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise RunError(f"the environment's packages need {name} {version}, which is not installed here") from None
        if there != version:
            _log.warning("environment: the run was pinned with %s %s; this machine has %s", name, version, there)


def _cache_of(wheels: Sequence[WheelContent]) -> Path:
    """Return where these wheels are installed for this interpreter: the same ones for every run."""
    told = "\n".join([sys.version, *sorted(each.sha256 for each in wheels)])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root.absolute() / _CACHE / hashlib.sha256(told.encode()).hexdigest()[:32]


def _install(directory: Path, wheels: Sequence[WheelContent], site: Path) -> None:
    """Let pip, or uv where there is no pip, put the wheels into a directory of their own."""
    atomic_write.make_directory(site.parent, mode=atomic_write.PRIVATE)
    with tempfile.TemporaryDirectory(dir=site.parent) as place, atomic_write.directory(site, durable=False) as fresh:
        wanted = Path(place) / "requirements.txt"
        lines = [
            f"{each.distribution} @ {(directory / each.file).absolute().as_uri()} --hash=sha256:{each.sha256}\n"
            for each in wheels
        ]
        wanted.write_text("".join(lines), encoding="utf-8")
        options = ["--no-index", "--no-deps", "--require-hashes", "--target", str(fresh), "-r", str(wanted)]
        told = subprocess.run(
            [*_installer(), *options], capture_output=True, text=True, timeout=_INSTALL_S, check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))},
        )  # fmt: skip
        if told.returncode:
            last = "\n  ".join(told.stderr.strip().splitlines()[-4:])
            raise RunError(f"the environment's packages could not be installed:\n  {last}")
        (fresh / ".lock").unlink(missing_ok=True)  # uv's, and no file of a package


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        quiet = ["--isolated", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--quiet"]
        return [sys.executable, "-I", "-m", "pip", "install", *quiet, "--no-compile", "--no-warn-conflicts"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--no-config", "--no-cache", "--offline", "--quiet", "--python", sys.executable]
    raise RunError("neither pip nor uv is installed here, and one of them installs the environment's packages")


def _check_site(site: Path, wheels: Sequence[WheelContent]) -> None:
    """Compare what is installed with the wheels, file by file. RunError if one was changed, added or taken away."""
    wanted = dict[str, str]()
    for each in wheels:
        if twice := sorted(wanted.keys() & each.files.keys()):
            raise SpecError(f"{each.file}: has {twice[0]}, which another of the environment's packages has, too")
        wanted |= each.files
    there = dict[str, str]()
    for path in site.rglob("*"):
        name = path.relative_to(site).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            there[name] = "a link"
        elif path.is_file() and not name.partition("/")[0].endswith(".dist-info"):
            there[name] = file_digest(path.read_bytes())
    differ = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if differ:
        raise RunError(
            f"{site / differ[0]}: is not the file of the environment's package; it was changed. Delete {site}, and it "
            "is installed again"
        )
