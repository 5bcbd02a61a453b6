"""Runs inside vLLM's environment: one model with Tandem's worker extension, asked line by line.

stdin: one JSON request a line; the descriptor given as the first argument: one JSON answer a line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    options = json.loads(sys.argv[2])
    from vllm import LLM

    llm = LLM(
        worker_extension_cls="tandem.vllm_worker.extension.TandemWorker",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        logprobs_mode="processed_logprobs",
        **options,
    )
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(globals()[request["do"]](llm, **request["with"])) + "\n")


def call(llm: Any, method: str, args: list[Any]) -> Any:
    return llm.collective_rpc(method, args=tuple(args))[0]


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, adapter: str = "", number: int = 0) -> Any:
    """Greedy; ids and logprobs."""
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    request = LoRARequest(adapter, number, f"tandem:{adapter}") if adapter else None
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, lora_request=request, use_tqdm=False)
    return [
        {
            "ids": list(each.outputs[0].token_ids),
            "logprobs": [
                at[token].logprob for at, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)
            ],
        }
        for each in done
    ]


def forget(llm: Any) -> bool:
    """Prefixes of older weights."""
    return bool(llm.reset_prefix_cache())


def plant(llm: Any, code: str) -> str:
    """Runs `code` with the model at hand: a fault that somebody planted."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.get_model()
    exec(code, {"model": model, "worker": worker, "llm": llm})
    return ""


def refusal(llm: Any, code: str) -> str:
    """What the layout says of the model after `code` has changed it; `undo`, which `code` may define, ends it."""
    from tandem.errors import SyncError
    from tandem.vllm_worker.served_memory import layout_of

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    names: dict[str, Any] = {"model": model, "layer": model.model.layers[0]}
    exec("import torch\n" + code, names)
    try:
        layout_of(model)
    except SyncError as error:
        return str(error)
    finally:
        exec(names.get("undo", ""), names)
    return ""


if __name__ == "__main__":
    main()
