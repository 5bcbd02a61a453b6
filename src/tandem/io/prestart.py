"""Start a program early, before its arguments are known: `python -m tandem.io.prestart FILE MODULE...`.

consumes: a file with the arguments     waits for: that file
produces: a running program, whose imports were done before

A program that is restarted often spends most of each start on imports, which do not depend on its arguments. So the
next process is started early: it imports the modules, waits for FILE, and then runs what FILE contains as `python -m`
would: ["module", "argument", ...]. The process that starts it also ends it (io/child_process.py).
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
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # the module was imported on purpose
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
