"""How long vLLM's own transfer of weights takes: `python benchmarks/gpu/native_transfer.py --shape qwen3-8b --gpu 1`,
beside `sync_fast.py broadcast --gpu 1`, with two GPUs and vLLM's Python.

A checkpoint of the shape on the first GPU, `vllm serve` on the second, NCCL, packed, as vLLM documents it: pause,
start, update, finish, resume. Medians of 8 after 2. Nothing is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from standing import ask_for_checkpoint, checkpoint_of
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

from tandem.engine.vllm_process import VllmOptions, VllmProcess
from tandem.recipes import build_alone

WARM, ROUNDS = 2, 8
NCCL = ("--weight-transfer-config", '{"backend": "nccl"}')


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def measure(process: VllmProcess, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    meeting = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    theirs = process.post("/init_weight_transfer_engine", {"init_info": meeting}, deadline_s=120)
    group, _ = await asyncio.gather(asyncio.to_thread(NCCLWeightTransferEngine.trainer_init, meeting), theirs)
    info = {
        "names": list(tensors), "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()], "packed": True,
    }  # fmt: skip

    def send() -> None:
        arguments = NCCLTrainerSendWeightsArgs(group=group, packed=True)
        NCCLWeightTransferEngine.trainer_send_weights(iter(tensors.items()), arguments)
        torch.cuda.synchronize()

    async def update() -> None:
        theirs = process.post("/update_weights", {"update_info": info}, deadline_s=120)
        await asyncio.gather(theirs, asyncio.to_thread(send))

    steps = {
        "pause": lambda: process.post("/pause", deadline_s=60, mode="keep"),
        "start": lambda: process.post("/start_weight_update", deadline_s=60),
        "update": update,
        "finish": lambda: process.post("/finish_weight_update", deadline_s=60),
        "resume": lambda: process.post("/resume", deadline_s=60),
    }
    rows: list[dict[str, float]] = []
    for _ in range(WARM + ROUNDS):
        row: dict[str, float] = {}
        for name, step in steps.items():
            began = time.perf_counter()
            await step()
            row[name] = (time.perf_counter() - began) * 1e3
        rows.append(row)
    rows = rows[WARM:]
    paused = [sum(row.values()) for row in rows]
    return {
        "bytes": sum(each.nbytes for each in tensors.values()),
        "paused_ms": [min(paused), statistics.median(paused), max(paused)],
        "ms": {name: round(statistics.median(row[name] for row in rows), 1) for name in steps},
    }


async def measured(process: VllmProcess, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    try:
        return await measure(process, tensors)
    finally:
        await process.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    ask_for_checkpoint(parser)
    parser.add_argument("--gpu", type=int, default=1, help="vLLM's")
    parser.add_argument("--python", default=build_alone.default_python())
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    checkpoint = checkpoint_of(arguments)
    home = Path("/tmp/native-transfer") / checkpoint.name
    home.mkdir(parents=True, exist_ok=True)
    options = VllmOptions(
        str(checkpoint), arguments.python, dtype="bfloat16", memory_share=arguments.share, max_context=512,
        eager=arguments.eager, extra=NCCL, environment={"CUDA_VISIBLE_DEVICES": str(arguments.gpu)},
    )  # fmt: skip
    process = VllmProcess(options, home)
    try:
        files = sorted(checkpoint.glob("*.safetensors"))
        tensors = {name: tensor.to(arguments.device) for file in files for name, tensor in load_file(file).items()}
        process.wait_ready(300)
        row = asyncio.run(measured(process, tensors))
    finally:
        process.kill()
    low, middle, high = row["paused_ms"]
    print(
        f"vLLM's own, packed: {checkpoint.name}: {middle:.1f} ms paused ({low:.1f}-{high:.1f}), {row['ms']}", flush=True
    )
    (Path(os.environ.get("OUT", ".")) / f"native-{checkpoint.name}.json").write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
