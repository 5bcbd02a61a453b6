"""Families in vLLM: what `tandem engine check --model` says of each. `python tests/families/family_vllm.py --python P`.

It starts a vLLM for each family and bridge, half a minute each on two cores, and writes rows that docs/make_families.py
reads. `--only` takes names of families, `--bridge` names of bridges; a row replaces one of the same family, bridge
and device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("vllm_rows.jsonl")
_LOGPROBS = "logprobs match the trainer's"


def main() -> None:
    from family_suite import FAMILIES

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--python", required=True, help="vLLM's interpreter")
    given.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given.add_argument("--only", nargs="*", default=list(FAMILIES))
    given.add_argument("--bridge", nargs="*", default=["disk", "shared"])
    given.add_argument("--at-once", type=int, default=1)
    given.add_argument("--rows", type=Path, default=ROWS)
    args = given.parse_args()
    work = [(name, args.python, args.device, bridge, args.at_once) for name in args.only for bridge in args.bridge]
    with ProcessPoolExecutor(args.at_once, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for found in pool.map(row, *zip(*work, strict=True)):
            print(json.dumps(found), flush=True)
            kept = {_key(each): each for each in [*rows(args.rows), found]}
            args.rows.write_text("".join(f"{json.dumps(each)}\n" for each in kept.values()), encoding="utf-8")


def row(name: str, python: str, device: Any, bridge: str, at_once: int) -> dict[str, Any]:
    import torch
    from family_suite import FAMILIES, Bench

    import tandem
    from tandem.errors import TandemError

    torch.set_num_threads(1)
    share = {"memory_share": round(0.5 / at_once, 3), "eager": True} if device == "cuda" else {}
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(FAMILIES[name], Path(place))
        found = {"family": name, "bridge": bridge, "device": device, "vllm": "", "told": ""}
        try:
            check = tandem.check_engine(python, model=str(bench.path), bridges=[bridge], device=device, options=share)
        except TandemError as error:
            return found | {"told": _short(str(error), bench.path)}
        failed = [f"{each.name.partition(': ')[2]}: {each.why}" for each in check.checks if each.state == "failed"]
        gap = next((re.search(r"within (\S+) nats", each.why) for each in check.checks if _LOGPROBS in each.name), None)
        told = {"gap": float(gap[1])} if gap else {}
        return found | {"vllm": check.version, "told": _short(failed[0], bench.path) if failed else "yes", **told}


def rows(path: Path = ROWS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _key(each: dict[str, Any]) -> tuple[str, ...]:
    return tuple(each[key] for key in ("family", "bridge", "device"))


def _short(text: str, path: Path) -> str:
    """Return what was said without paths; of a vLLM that did not start, its last error."""
    text = re.sub(r"\(\w+ pid=\d+\) ", "", text.replace(str(path), "MODEL"))
    if "the last lines of" in text:
        errors = [
            line.strip() for line in text.splitlines() if re.match(r"\s*([\w.]+(Error|Exception)\b|Assertion)", line)
        ]
        return f"vLLM does not start: {(errors or text.splitlines())[-1].strip().partition(' [type=')[0]}"
    return re.sub(r"\s+", " ", text)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    main()
