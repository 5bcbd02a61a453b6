"""What an adapter costs vLLM's decoding, kernel by kernel: `python benchmarks/gpu/lora_kernels.py`, with vLLM's Python.

The four linear layers of Qwen3-1.7B, 28 times with weights of their own, as one CUDA graph: without an adapter, and
with one of rank 16 in one of `--slots`. As vLLM computes it (`theirs`), all of it on a second stream as vLLM does with
VLLM_LORA_ENABLE_DUAL_STREAM (`aside`), and as vllm_worker/lora_layers.py does (`beside`), each with vLLM's block
sizes, with
that file's (`fit`), and with the best that were found for each kernel alone (`--search TOKENS`). Median of 20 replays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.lora.ops import triton_ops
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

from tandem.vllm_worker.lora_layers import fitting, linear_beside

LAYERS, RANK, REPLAYS = 28, 16, 20
LINEARS = {
    "qkv": (2048, (2048, 1024, 1024)), "o": (2048, (2048,)), "gate_up": (2048, (6144, 6144)), "down": (6144, (2048,)),
}  # fmt: skip
GPU, SECOND = torch.device("cuda"), torch.cuda.Stream()
FLAG = "VLLM_LORA_ENABLE_DUAL_STREAM"
Config = dict[str, Any]
Blocks = Callable[..., Config]


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16) * 0.02


class Layer:
    """As much of vLLM's linear layer with adapters as is computed with."""

    meta: tuple[Any, ...]

    def __init__(self, name: str, slots: int) -> None:
        self.width, self.output_slices = LINEARS[name]
        self.base_layer = made(sum(self.output_slices), self.width)
        self.lora_a_stacked = tuple(made(slots, 1, RANK, self.width) for _ in self.output_slices)
        self.lora_b_stacked = tuple(made(slots, 1, size, RANK) for size in self.output_slices)

    def add_shrink(self, low: torch.Tensor, x: torch.Tensor, a: Any, scale: float) -> None:
        lora_shrink_op._lora_shrink(x, a, low, *self.meta, scale)

    def add_expand(self, y: torch.Tensor, low: torch.Tensor, b: Any, slices: Any, add_inputs: bool = True) -> None:
        lora_expand_op._lora_expand(low, b, y, *self.meta, offset_start=0, add_inputs=add_inputs)

    def low(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty((len(self.output_slices), len(x), RANK), dtype=torch.float32, device=GPU)


def base(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.base_layer)


def theirs(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y, low = base(layer, x), layer.low(x)
    layer.add_shrink(low, x, layer.lora_a_stacked, 1.0)
    layer.add_expand(y, low, layer.lora_b_stacked, layer.output_slices)
    return y


def aside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    here = torch.cuda.current_stream()
    SECOND.wait_stream(here)
    y = base(layer, x)
    os.environ[FLAG] = "1"  # its kernels are launched in another way with it
    with torch.cuda.stream(SECOND):
        delta, low = torch.zeros_like(y), layer.low(x)
        layer.add_shrink(low, x, layer.lora_a_stacked, 1.0)
        layer.add_expand(delta, low, layer.lora_b_stacked, layer.output_slices, False)
    os.environ[FLAG] = "0"
    here.wait_stream(SECOND)
    return y.add_(delta)


def beside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    a, b = list(layer.lora_a_stacked), list(layer.lora_b_stacked)
    return linear_beside(triton_ops, x, layer.base_layer, None, a, b, list(layer.meta))


def graph_us(body: Callable[[], Any]) -> float:
    """Of one replay, in microseconds."""
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        times: list[float] = []
        for _ in range(REPLAYS + 3):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) * 1e3)
    return statistics.median(times[3:])


def use(blocks: Blocks) -> None:
    lora_shrink_op.get_lora_op_configs = lora_expand_op.get_lora_op_configs = blocks


def searched(layers: dict[str, list[Layer]], tokens: int, original: Blocks) -> Blocks:
    """The fastest block sizes of each layer's two kernels, alone."""
    best: dict[tuple[str, int, int], tuple[float, Config]] = {}
    rows = [m for m in (16, 32, 64) if m <= max(16, tokens)]
    for name, stack in layers.items():
        width, slices = LINEARS[name]
        x = made(tokens, width)
        lows, y = [each.low(x) for each in stack], made(tokens, sum(slices))

        def shrink(stack: list[Layer] = stack, lows: list[torch.Tensor] = lows, x: torch.Tensor = x) -> None:
            for layer, low in zip(stack, lows, strict=True):
                layer.add_shrink(low, x, layer.lora_a_stacked, 1.0)

        def expand(stack: list[Layer] = stack, lows: list[torch.Tensor] = lows, y: torch.Tensor = y) -> None:
            for layer, low in zip(stack, lows, strict=True):
                layer.add_expand(y, low, layer.lora_b_stacked, layer.output_slices)

        tries: dict[str, tuple[int, Callable[[], None], list[Config]]] = {
            "shrink": (width, shrink, [
                {"block_m": m, "block_k": k, "split_k": width // k // part}
                for m, k, part in itertools.product(rows, (128, 256), (1, 2))
            ]),
            "expand": (max(slices), expand, [
                {"block_m": m, "block_n": n, "block_k": 16} for m, n in itertools.product(rows, (64, 128))
            ]),
        }  # fmt: skip
        for kind, (size, body, changes) in tries.items():
            use(original)
            was = graph_us(body)
            found: list[tuple[float, Config]] = []
            for change in changes:
                use(lambda *kind, change=change, **asked: {**original(*kind, **asked), **change})
                found.append((graph_us(body), change))
            key = kind, len(slices), size
            best[key] = min([*found, *([best[key]] if key in best else [])], key=lambda each: each[0])
            print(f"  {tokens} {name} {kind}: {was:.0f} -> {best[key][0]:.0f} us, {best[key][1]}", flush=True)
    return lambda op_type, **asked: {
        **original(op_type, **asked), **best[op_type, asked["num_slices"], asked["hidden_size"]][1]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 8, 128, 256, 512])
    parser.add_argument("--search", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers = {name: [Layer(name, arguments.slots) for _ in range(LAYERS)] for name in LINEARS}
    original = utils.get_lora_op_configs

    def tell(tokens: int) -> None:
        meta = LoRAKernelMeta.make(arguments.slots, 512, GPU)
        meta.prepare_tensors(torch.zeros(tokens, dtype=torch.int32, device=GPU))
        for stack in layers.values():
            for layer in stack:
                layer.meta = meta.meta_args(tokens, False)

    rows: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for tokens in arguments.tokens:
        tell(tokens)
        ways = {"": original, ", fit": fitting(original)}
        if tokens in arguments.search:
            ways[", best"] = searched(layers, tokens, original)
        inputs = {name: made(tokens, stack[0].width) for name, stack in layers.items()}
        row: dict[str, float] = {}
        for how in (base, theirs, aside, beside):
            for told, blocks in ways.items():
                use(blocks)

                def step(how: Callable[[Layer, torch.Tensor], Any] = how, inputs: Any = inputs) -> None:
                    for number in range(LAYERS):
                        for name, x in inputs.items():
                            how(layers[name][number], x)

                if how is not base or not told:
                    row[how.__name__ + told] = round(graph_us(step))
        rows[str(tokens)] = row
        print(tokens, "tokens, us:", row, flush=True)
    (Path(os.environ.get("OUT", ".")) / "lora-kernels.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
