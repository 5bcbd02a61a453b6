"""Digests of all tensors of a model on one GPU: right, how long, and how far from what the memory can give.

    PYTHONPATH=src python benchmarks/gpu/digest.py --out results

Needs torch and triton. Predicted on an H200 (4.3 TB/s to be had of 4.8): the kernel reads each byte once and needs 6.5
instructions for a bf16 element, 2.0 ms of issue for 16 GB beside 3.8 ms of reading; its table takes the host about 2 ms
for 312 tensors. So 0.6B in 3 ms, 8B in 6 ms; tensor by tensor 0.6B was measured at 100 to 130 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.ops import digest

DEVICE = "cuda"
QWEN3 = {  # hidden, intermediate, layers, heads, whether the output embedding is the input's
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
}
VOCABULARY, HEAD, KV_HEADS = 151936, 128, 8


def tensors_of(shape: str) -> dict[str, Tensor]:
    """As an engine serves them: q, k, v and gate, up are slices of fused parameters."""
    hidden, wide, layers, heads, tied = QWEN3[shape]
    query, key = heads * HEAD, KV_HEADS * HEAD
    found = {
        "embed": _random(VOCABULARY, hidden),
        "norm": _random(hidden),
        "inv_freq": _random(HEAD // 2, dtype=torch.float32),
    }
    if not tied:
        found["lm_head"] = _random(VOCABULARY, hidden)
    for layer in range(layers):
        qkv, gate_up = _random(query + 2 * key, hidden), _random(2 * wide, hidden)
        parts = {
            "q": qkv[:query], "k": qkv[query : query + key], "v": qkv[query + key :], "o": _random(hidden, query),
            "gate": gate_up[:wide], "up": gate_up[wide:], "down": _random(hidden, wide),
            "q_norm": _random(HEAD), "k_norm": _random(HEAD), "norm_1": _random(hidden), "norm_2": _random(hidden),
        }  # fmt: skip
        found |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return found


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest.text(digest.sum_of(digest.as_matrix((name, each, 0, 0)))) for name, each in tensors.items()}


def oddities() -> dict[str, bool]:
    """Each against the CPU."""
    found: dict[str, bool] = {}
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float32, torch.float64):
        matrix = _random(300, 2100 * dtype.itemsize // 2, dtype=dtype)
        forms = {
            "whole": matrix, "columns": matrix[:, 64:576], "unaligned": matrix[5:, 1:1030], "turned": matrix.t(),
            "gaps": matrix[::2, ::3], "vector": matrix[0], "column": matrix[:, 3], "scalar": matrix[1, 1],
            "empty": matrix[:0], "repeated": matrix[:1].expand(9, -1), "cube": matrix.view(30, 10, -1).transpose(0, 1),
        }  # fmt: skip
        for form, tensor in forms.items():
            found[f"{dtype} {form}"] = digest.piece(tensor, form, 2**33, 7) == digest.piece(
                tensor.cpu(), form, 2**33, 7
            )
    return found


def milliseconds(call: Callable[[], Any], rounds: int) -> list[float]:
    """With the wait for the answer, as a sync has it. The first three warm up."""
    times: list[float] = []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if number >= 3:
            times.append((time.perf_counter() - started) * 1e3)
    return times


def kernel_ms(call: Callable[[], Any]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profile.key_averages() if "_add_up" in each.key) / 1e3


def measured(way: str, tensors: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Any]) -> dict[str, Any]:
    size, times = sum(tensor.nbytes for tensor in tensors.values()), milliseconds(lambda: call(tensors), rounds=20)
    ms, kernel = statistics.median(times), kernel_ms(lambda: call(tensors))
    gb_s = {"gb_s": size / ms / 1e6, "kernel_gb_s": size / kernel / 1e6 if kernel else 0.0}
    return {
        "way": way,
        "tensors": len(tensors),
        "bytes": size,
        "ms": ms,
        "kernel_ms": kernel,
        **gb_s,
        "times_ms": times,
    }


def rows_of(shape: str) -> list[dict[str, Any]]:
    tensors = tensors_of(shape)
    ways: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "at once": digest.fingerprints,
        "by 512 MiB": lambda each: list(digest.fingerprinted(each.items())),
    }
    if shape == "qwen3-0.6b":
        assert one_by_one(tensors) == digest.fingerprints(tensors), "the kernel's numbers are not those of plain torch"
        ways["one by one"] = one_by_one
    return [measured(f"{shape}, {way}", tensors, call) for way, call in ways.items()]


def measure() -> dict[str, Any]:
    torch.manual_seed(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    why_not = digest.why_not_fused()  # compiles the kernel for one width
    first_call_s = time.perf_counter() - started
    started = time.perf_counter()
    odd = oddities()  # and for all others
    return {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "why_not_fused": why_not,
        "first_call_s": first_call_s,
        "oddities_s": time.perf_counter() - started,
        "oddities": odd,
        "rows": [row for shape in QWEN3 for row in rows_of(shape)],
    }


def show(result: dict[str, Any]) -> None:
    wrong = [name for name, right in result["oddities"].items() if not right]
    print(f"{result['device']}, torch {result['torch']}; fused: {result['why_not_fused'] or 'yes'}")
    print(f"equal to the CPU: {len(result['oddities']) - len(wrong)} of {len(result['oddities'])} {wrong or ''}")
    print(f"first call {result['first_call_s']:.2f} s, all widths {result['oddities_s']:.2f} s, with compiling\n")
    print(f"{'':26}{'tensors':>8}{'GB':>8}{'ms':>9}{'GB/s':>8}{'kernel ms':>11}{'GB/s':>8}")
    for row in result["rows"]:
        print(
            f"{row['way']:26}{row['tensors']:8}{row['bytes'] / 1e9:8.2f}{row['ms']:9.2f}{row['gb_s']:8.0f}"
            f"{row['kernel_ms']:11.2f}{row['kernel_gb_s']:8.0f}"
        )


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    *rows, cols = shape
    words = torch.randint(-(2**15), 2**15, (*rows, cols * dtype.itemsize // 2), dtype=torch.int16, device=DEVICE)
    return words.view(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    result = measure()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "digest.json").write_text(json.dumps(result, indent=1))
    show(result)
    assert all(result["oddities"].values()), "the kernel's numbers are not the CPU's"


if __name__ == "__main__":
    main()
