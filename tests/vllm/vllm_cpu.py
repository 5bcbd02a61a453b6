"""vLLM on the CPU, in its own Python environment, behind pipes: and small models for it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import tandem
from tandem.engine.vllm.engine import VllmEngine
from tandem.types import Weights

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TANDEM_VLLM_PYTHON", ROOT / ".tandem/vllm/bin/python"))
HERE = Path(__file__).parent


ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Vllm:
    """The driver, as an object."""

    def __init__(self, folder: Path, **options: Any) -> None:
        path = folder / "path"
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "tandem").exists():
            (path / "tandem").symlink_to(Path(tandem.__file__).parent)
        ours, theirs = os.pipe()
        self._log = (folder / "log.txt").open("w")
        self._process = subprocess.Popen(
            [str(PYTHON), str(HERE / "driver.py"), str(theirs), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(path)},
            text=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(ours)
        self._answer()

    def do(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def call(self, method: str, *args: Any) -> Any:
        return self.do("call", method=method, args=list(args))

    def generate(self, *prompts: list[int], adapter: str = "", number: int = 0) -> list[dict[str, Any]]:
        return self.do("generate", prompts=list(prompts), max_tokens=8, adapter=adapter, number=number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            self._process.wait()
            log = Path(self._log.name).read_text()
            raise AssertionError(f"the driver ended with {self._process.returncode}: {log[-3000:]}")
        return json.loads(line)


def small_model(kind: str = "Qwen3", seed: int = 0, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """Random, and far from its initial values: norms and biases too, so that none of them can be forgotten."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 200,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
        }
        | settings
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.data = parameter.data.to(dtype)  # not model.to(): rotary frequencies stay exact, as when loaded
    return model.eval()


def adapted(
    module: Any, seed: int, rank: int = 4, targets: str | list[str] = "all-linear", rslora: bool = False
) -> Any:
    """`module` with adapters that do something."""
    from peft import LoraConfig

    from tandem.model.lora import attach

    config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM")
    wrapped = attach(copy.deepcopy(module), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return wrapped


def changed(module: Any, seed: int = 1) -> Any:
    """Weights of another version."""
    torch.manual_seed(seed)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


def full(module: Any, version: int) -> Weights:
    from tandem.model.served_weights import whole

    return Weights(version, "full", lambda: whole(module))


async def publish(engine: VllmEngine, bridge: Any, module: Any) -> None:
    """As the next version, over a bridge of one engine."""
    version = engine.version + 1
    await engine.attach(bridge.source(1))
    await asyncio.gather(asyncio.to_thread(bridge.send, full(module, version)), engine.load(version))


def gap(module: Any, prompt: list[int], answer: dict[str, Any]) -> float:
    """Mean distance, in nats, between what the engine says of its tokens and what `module` does."""
    return (logprobs_of(module, prompt, answer["ids"]) - torch.tensor(answer["logprobs"])).abs().mean().item()


@torch.no_grad()
def logprobs_of(module: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    logits = module(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
