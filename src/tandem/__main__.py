"""`python -m tandem`, and what the `tandem` command calls."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tandem.cli.main import main as run  # in here: Ctrl-C while it is imported ends without a traceback, too

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
