"""Bring the packages that a run's environment names to its machine, with the attempt's own token.

The trainer does not get the token. It gets pins and wheels in the job's directory, and asks no index.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from tandem.agent.link import Link
from tandem.client.index import PackageIndex
from tandem.errors import SpecError
from tandem.runs.environment_packages import keep_packages
from tandem.runs.lease import PACKAGES
from tandem.spec.environment import packages_in
from tandem.spec.load import parse_spec


def with_packages(spec_toml: str, run_dir: Path, home: Path, link: Link) -> str:
    """Return the spec with `environment.pins`, once its packages are in the job's directory; the spec itself if it
    names none, or if the run was begun, and keeps them. SpecError if the index has not what it names."""
    if (run_dir / "spec.toml").exists():
        return spec_toml
    try:
        tables = tomllib.loads(spec_toml)
        environment = getattr(parse_spec(tables), "environment", None)
    except (ValueError, SpecError):  # the trainer says what is wrong with it
        return spec_toml
    names = [] if environment is None else packages_in(environment.name, environment.params)
    if not names or environment is None or environment.pins:
        return spec_toml
    kept = home / PACKAGES
    if not kept.exists():
        keep_packages(names, PackageIndex(link.fetch, link.url), kept)
    written: Any = tables["environment"]
    (written[0] if isinstance(written, list) else written)["pins"] = str(kept.absolute())
    return tomli_w.dumps(tables)
