"""Families in vLLM: what `tandem engine check --model` says of each. `python tests/families/family_vllm.py --python P`.

It starts a vLLM for each family and bridge, half a minute each on two cores, and writes rows that docs/make_families.py
reads. `--only` takes names of families, `--bridge` names of bridges; a row replaces one of the same family, bridge
and device. Where adapters on all linear layers are refused, it checks those that the refusal names.
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
_DELTA_NETS = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")
"""Families that vLLM's CPU build computes in bfloat16 alone, and on a GPU with a choice of kernels."""
_PUBLISHED_DELTA_NETS = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
"""Sizes that vLLM's kernels are made for."""
_ON_GPU: dict[str, dict[str, Any]] = {
    # vLLM 0.26 takes their heads to be as wide as together fill the hidden size.
    "OLMo3": {"hidden_size": 128},
    "Cohere2": {"hidden_size": 128},
    "DeepSeek-V3": {"num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
"""Sizes that vLLM's kernels need there."""
_NAMED = re.compile(r"model\.lora\.targets = (\[.*?\])")
"""The layers to adapt where not all can be."""
_SEVERAL = ["--kv-cache-memory-bytes", str(2**31)]
"""With it vLLM measures no free memory, which others take meanwhile."""
_NO_FLASHINFER = ["--gdn-prefill-backend", "triton"]
"""Otherwise vLLM takes flashinfer's kernel for delta nets, which these machines lack."""


def main() -> None:
    from family_models import FAMILIES

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
    from family_models import FAMILIES, Bench

    import tandem
    from tandem.errors import TandemError

    torch.set_num_threads(1)
    family, on_gpu = FAMILIES[name], device == "cuda"
    options: dict[str, Any] = {}
    if name in _DELTA_NETS:
        family = family._replace(sizes={**family.sizes, **_PUBLISHED_DELTA_NETS})
    if on_gpu:
        family = family._replace(sizes={**family.sizes, **_ON_GPU.get(name, {})})
        several = _SEVERAL if at_once > 1 else []
        delta_nets = _NO_FLASHINFER if name in _DELTA_NETS else []
        options = {
            "memory_share": round(0.5 / at_once, 3), "eager": True, "arguments": [*several, *delta_nets]
        }  # fmt: skip
    dtype: Any = "bfloat16" if on_gpu or name in _DELTA_NETS else "float32"
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(family, Path(place))
        found = {"family": name, "bridge": bridge, "device": device, "vllm": "", "told": ""}
        targets: list[str] = []
        for _ in range(2):
            try:
                check = tandem.check_engine(
                    python, model=str(bench.path), bridges=[bridge], device=device, dtype=dtype, options=options,
                    targets=targets,
                )  # fmt: skip
            except TandemError as error:
                return found | {"told": _short(str(error), bench.path)}
            failed = [f"{each.name.partition(': ')[2]}: {each.why}" for each in check.checks if each.state == "failed"]
            said = " ".join([*failed, *(each.why for each in check.checks)])
            if targets or not (named := _NAMED.search(said)):
                break
            targets = json.loads(named[1])
            if not failed:  # it took them by itself
                break
        gap = next((re.search(r"within (\S+) nats", each.why) for each in check.checks if _LOGPROBS in each.name), None)
        told: dict[str, Any] = {"gap": float(gap[1]), "dtype": dtype} if gap else {}
        if targets and not failed:
            told["targets"] = targets
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
