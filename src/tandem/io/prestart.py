"""A start that is made ready before anybody knows what is to be started: `python -m tandem.io.prestart FILE MODULE...`.

consumes: a file, once its owner has written it     waits for: that file
produces: a program that has its imports behind it when it is told what to do

A program that is to be ended and started again spends most of a start on imports, which depend on nothing. So the next
one is started early. As a program this imports the modules, and once FILE is there, runs what it names as `python -m`
would: ["module", "argument", ...]. The process that starts it ends it, too (io/child_process.py).
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tandem.io import atomic_write

_LOOK_S = 0.02


def tell(path: Path, what: Any) -> None:
    atomic_write.write_text(path, json.dumps(what))


def told(path: Path) -> Any:
    """Waits."""
    while not path.exists():
        time.sleep(_LOOK_S)
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    path, *modules = sys.argv[1:]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  another version, perhaps: what is run then says what it needs
            print(f"ahead: {name} cannot be imported: {error}", file=sys.stderr, flush=True)
    module, *arguments = told(Path(path))
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # that it is there was the point
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
