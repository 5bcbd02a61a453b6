"""What vLLM takes by itself for what Tandem does with it: `python benchmarks/gpu/vllm_alone.py weights --gpu 1`.

`weights`: its own transfer from a checkpoint on the first GPU to `vllm serve` on `--gpu`, NCCL, packed, as vLLM
documents it: pause, start, update, finish, resume. Beside `sync_fast.py broadcast`.
`adapter`: rank 16 on every linear layer, written to files and loaded over HTTP under a new name, to the first token.
Beside `sync_fast.py adapter`.
`rollouts`: 256 prompts of 128 tokens and 512 new ones from `vllm.LLM` as vLLM ships it, with its own scheduler: with
logprobs and text, as TRL 1.16 asks it; with logprobs alone; with neither. Beside `rollouts.py`, whose ways all ask a
vLLM that runs Tandem's scheduler.

Medians of 8 after 2, of rollouts 3 after 1. Nothing is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from standing import ask_for_checkpoint, checkpoint_of

from rollouts import PROMPT, prompt_of, vocabulary
from tandem.build import standalone_engines
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.io.file_system import memory_backed

WARM, ROUNDS, TIMES, RANK = 2, 8, 3, 16
NCCL = ("--weight-transfer-config", '{"backend": "nccl"}')

Steps = dict[str, Callable[[], Awaitable[Any]]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def timed(steps: Steps, afterwards: Callable[[], Awaitable[Any]] | None = None) -> dict[str, Any]:
    """The same steps again and again, one after the other. What is done `afterwards` is in nobody's time."""
    rows: list[dict[str, float]] = []
    for _ in range(WARM + ROUNDS):
        row: dict[str, float] = {}
        for name, step in steps.items():
            began = time.perf_counter()
            await step()
            row[name] = (time.perf_counter() - began) * 1e3
        rows.append(row)
        if afterwards is not None:
            await afterwards()
    rows = rows[WARM:]
    whole = [sum(row.values()) for row in rows]
    middle = {name: round(statistics.median(row[name] for row in rows), 1) for name in steps}
    return {"in_all_ms": [min(whole), statistics.median(whole), max(whole)], "ms": middle}


def tensors_of(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor.to(device) for file in files for name, tensor in load_file(file).items()}


async def weights(process: VllmProcess, checkpoint: Path, device: str) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    tensors = tensors_of(checkpoint, device)
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

    steps: Steps = {
        "pause": lambda: process.post("/pause", deadline_s=60, mode="keep"),
        "start": lambda: process.post("/start_weight_update", deadline_s=60),
        "update": update,
        "finish": lambda: process.post("/finish_weight_update", deadline_s=60),
        "resume": lambda: process.post("/resume", deadline_s=60),
    }
    return await timed(steps) | {"bytes": sum(each.nbytes for each in tensors.values())}


async def adapter(process: VllmProcess, checkpoint: Path, device: str) -> dict[str, Any]:
    shapes = {name: each.shape for name, each in tensors_of(checkpoint, "cpu").items() if name.endswith("_proj.weight")}
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in shapes.items():
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            noise = torch.randn(shape, generator=generator, device=device) * 0.01
            tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] = noise.bfloat16()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "bias": "none", "target_modules": sorted({name.split(".")[-2] for name in shapes}),
        "base_model_name_or_path": str(checkpoint),
    }  # fmt: skip
    home = memory_backed() / f"vllm-alone-{os.getpid()}"
    version = 0

    def write() -> None:
        place = home / str(version)
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text(json.dumps(config))
        save_file({name: each.cpu() for name, each in tensors.items()}, place / "adapter_model.safetensors")

    async def load() -> None:
        asked = {"lora_name": f"v{version}", "lora_path": str(home / str(version))}
        await process.post("/v1/load_lora_adapter", asked, deadline_s=60)

    async def first_token() -> None:
        asked = {"model": f"v{version}", "prompt": [version % 200 + 5] * 32, "max_tokens": 1}
        await process.post("/v1/completions", asked, deadline_s=60)

    async def forget() -> None:
        nonlocal version
        await process.post("/v1/unload_lora_adapter", {"lora_name": f"v{version}"}, deadline_s=60)
        shutil.rmtree(home / str(version))
        version += 1

    steps: Steps = {"write": lambda: asyncio.to_thread(write), "load": load, "first_token": first_token}
    try:
        return await timed(steps, forget) | {"bytes": sum(each.nbytes for each in tensors.values())}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def rollouts(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(checkpoint), max_model_len=PROMPT + arguments.tokens, max_num_seqs=arguments.requests,
        max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", enforce_eager=arguments.eager,
        **({} if arguments.device == "cpu" else {"gpu_memory_utilization": arguments.share}),
    )  # fmt: skip
    num_ids = vocabulary(checkpoint)
    ways = {"logprobs and text": (0, True), "logprobs": (0, False), "neither": (None, False)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + TIMES):
        for way, rates in found.items():
            logprobs, text = ways[way]
            asked = SamplingParams(
                max_tokens=arguments.tokens, temperature=1.0, logprobs=logprobs, ignore_eos=True, detokenize=text
            )
            seed = 10000 * (1 + len(found) * number + list(found).index(way))
            prompts = [{"prompt_token_ids": prompt_of(index, seed, num_ids)} for index in range(arguments.requests)]
            began = time.perf_counter()
            answers = engine.generate(prompts, asked, use_tqdm=False)
            took = time.perf_counter() - began
            rates.append(sum(len(each.outputs[0].token_ids) for each in answers) / took)
    return {"tokens_per_s": {way: rates[1:] for way, rates in found.items()}}


async def asked_of(process: VllmProcess, what: str, checkpoint: Path, device: str) -> dict[str, Any]:
    try:
        return await {"weights": weights, "adapter": adapter}[what](process, checkpoint, device)
    finally:
        await process.close()


def served(what: str, checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    home = Path("/tmp/vllm-alone") / f"{checkpoint.name}-{what}"
    home.mkdir(parents=True, exist_ok=True)
    options = VllmOptions(
        str(checkpoint), arguments.python, dtype="bfloat16", device=arguments.device, memory_share=arguments.share,
        max_context=512, eager=arguments.eager, environment={"CUDA_VISIBLE_DEVICES": str(arguments.gpu)},
        further=NCCL if what == "weights" else (), adapter_slots=3 if what == "adapter" else 0, max_rank=RANK,
    )  # fmt: skip
    process = VllmProcess(options, home)
    try:
        process.wait_ready(300)
        return asyncio.run(asked_of(process, what, checkpoint, arguments.device))
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", choices=["weights", "adapter", "rollouts"])
    ask_for_checkpoint(parser)
    parser.add_argument("--gpu", type=int, default=0, help="of the server; `rollouts` take the first")
    parser.add_argument("--python", default=standalone_engines.default_python())
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    if "weights" in arguments.what and not arguments.gpu:
        parser.error("the weights come from the first GPU: --gpu 1")
    checkpoint = checkpoint_of(arguments)
    for what in arguments.what:
        row = rollouts(checkpoint, arguments) if what == "rollouts" else served(what, checkpoint, arguments)
        print(f"vLLM alone, {what}: {checkpoint.name}: {json.dumps(row)}", flush=True)
        out = Path(os.environ.get("OUT", ".")) / f"vllm-alone-{checkpoint.name}-{what}.json"
        out.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
