"""What people's OpenAI clients can do with `tandem serve`: each call works, or is refused in words that they show.

    python benchmarks/clients.py [--model DIR_OR_GGUF] [--python CLIENTS_PYTHON]

Makes a virtual environment with openai, litellm, langchain-openai and instructor, serves a random model of a few layers
(or `--model`), and makes the calls of benchmarks/clients_calls.py. `--python`: an interpreter that has the clients
already. Exit code 1 if a call neither works nor is refused in words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import table

ROOT = Path(__file__).parents[1]
CLIENTS = ("openai==3.3.0", "litellm==1.110.2", "langchain-openai==1.7.4", "instructor==1.17.0")
START_S, CALLS_S = 300, 3600


def clients_python(home: Path) -> str:
    """The interpreter of a new environment with the clients."""
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = str(home / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CLIENTS], check=True)
    return python


def random_model(home: Path) -> Path:
    """A model of a few layers whose template knows tools and thoughts."""
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    make_model("tiny", tokenizer, seed=0).save_pretrained(home)
    tokenizer.save_pretrained(home)
    return home


@contextmanager
def serving(model: Path, home: Path) -> Iterator[tuple[str, str]]:
    """The url and the token of `tandem serve`."""
    ready = home / "ready.json"
    command = [sys.executable, "-m", "tandem", "serve", model, "--data-dir", home / "data", "--ready-file", ready]
    served = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if served.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("tandem serve did not start")
            time.sleep(0.2)
        told = json.loads(ready.read_text())
        yield told["url"], Path(told["token_file"]).read_text().strip()
    finally:
        served.terminate()
        served.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--python", default="")
    parser.add_argument("--only", default="", help="calls whose names contain this")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        python = asked.python or clients_python(home / "clients")
        model = asked.model or random_model(home / "model")
        with serving(model, home) as (url, token):
            script = [python, str(ROOT / "benchmarks" / "clients_calls.py"), url, asked.only]
            quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "THE_TOKEN": token}
            made = subprocess.run(
                script, env=os.environ | quiet, stdout=subprocess.PIPE, text=True, timeout=CALLS_S, check=True
            )
    rows = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    table(
        ("client", "call", "outcome", "s"),
        [(row["client"], row["call"], row["outcome"], f"{row['seconds']:.1f}") for row in rows],
    )
    counts = Counter(row["outcome"].partition(":")[0] for row in rows)
    print(f"\n{len(rows)} calls: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return int(counts["BROKEN"] > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
