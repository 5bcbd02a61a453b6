"""Have the packages of a spec's environment ready before it is loaded: from the run, from pins, or from the index."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.client import Tandem, find_place
from tandem.env.installed import InstalledPackages
from tandem.errors import SpecError
from tandem.runs.environment_packages import PINS, install_kept, keep_packages
from tandem.runs.lease import PACKAGES
from tandem.spec.environment import EnvironmentSpec, packages_in
from tandem.spec.run import RlSpec


@dataclass(frozen=True, slots=True)
class ReadyPackages:
    """`directory`: pins and wheels, which a new run copies."""

    directory: Path
    installed: InstalledPackages


@contextmanager
def ready_packages(spec: object, run_dir: Path | None = None) -> Generator[ReadyPackages | None]:
    """Yield the packages of a spec, or of its `[environment]`; None if it names none. `run_dir`: of a run that was
    begun: what it keeps is taken, whatever the index says today."""
    environment = spec.environment if isinstance(spec, RlSpec) else spec
    names = packages_in(environment.name, environment.params) if isinstance(environment, EnvironmentSpec) else []
    if not names or not isinstance(environment, EnvironmentSpec):
        yield None
        return
    if run_dir is not None and (run_dir / PACKAGES).exists():
        yield ReadyPackages(run_dir / PACKAGES, install_kept(run_dir / PACKAGES, names))
    elif environment.pins:
        pins = Path(environment.pins)
        if not (pins / PINS).exists():
            raise SpecError(f"environment.pins = '{pins}': has no {PINS}; name the directory RUN/{PACKAGES} of a run")
        yield ReadyPackages(pins, install_kept(pins, names))
    else:
        with tempfile.TemporaryDirectory(prefix="tandem-") as place:
            _from_index(names, Path(place) / PACKAGES)
            yield ReadyPackages(Path(place) / PACKAGES, install_kept(Path(place) / PACKAGES, names))


def _from_index(names: list[str], directory: Path) -> None:
    place = find_place()
    if place is None:
        raise SpecError(
            f"environment.name = '{names[0]}': is a package of a control server's index, and none is configured: "
            "`tandem login URL`"
        )
    with Tandem() as server:
        keep_packages(names, server.index(), directory, place.signing_key)
