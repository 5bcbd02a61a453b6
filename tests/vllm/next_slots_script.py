"""Run by vLLM's interpreter: its scheduler, twice, over the same requests; one asks about every slot, one is answered
early. Prints how often each was asked, and every step in which they differ."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter, deque
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as sync_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tandem.inside import slots

BLOCK, CONTEXT = 16, 128
Theirs: Any = kv_cache_manager.KVCacheManager


class Early(Theirs):
    """A manager of its own class, so that one process has both."""


ASKED: Counter[str] = Counter()


def counting(name: str, asks: Any = Theirs.allocate_slots) -> Any:
    def call(self: Any, *args: Any, **more: Any) -> Any:
        ASKED[name] += 1
        return asks(self, *args, **more)

    return call


class Run:
    def __init__(self, config: Any, cache: Any, num_blocks: int, *, ahead: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
        blocks = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        sync_scheduler.KVCacheManager = cache
        kind = AsyncScheduler if ahead else sync_scheduler.Scheduler
        self.scheduler = kind(
            vllm_config=config, kv_cache_config=blocks, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, log_stats=True,
        )  # fmt: skip
        assert type(self.scheduler.kv_cache_manager) is cache
        self.under_way: deque[Any] = deque()
        self.ahead = ahead

    def step(self, number: int) -> list[Any]:
        step = self.scheduler.schedule()
        if step.total_num_scheduled_tokens:
            self.under_way.append(step)
        told = [
            {new.req_id: new.block_ids for new in step.scheduled_new_reqs},
            dict(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.new_block_ids, strict=True)),
            dict(step.num_scheduled_tokens),
            sorted(step.preempted_req_ids or ()),
            self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        ]
        if len(self.under_way) > self.ahead or (self.under_way and not step.total_num_scheduled_tokens):
            told.append(self._done(self.under_way.popleft(), number))
        return told

    def _done(self, step: Any, number: int) -> list[Any]:
        names = list(step.num_scheduled_tokens)
        sampled = []
        for place, name in enumerate(names):
            request = self.scheduler.requests.get(name)
            known = request is not None and request.num_computed_tokens >= request.num_tokens - 1
            sampled.append([(number + 7 * place) % 200] if known and not request.is_prefill_chunk else [])
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        answers = self.scheduler.update_from_output(step, output)
        return [
            (each.request_id, each.new_token_ids, str(each.finish_reason))
            for of_client in answers.values()
            for each in of_client.outputs
        ]


def main() -> None:
    Early.allocate_slots, Theirs.allocate_slots = counting("early"), counting("theirs")
    slots.engage(Early)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    differ, preempted, ended = list[str](), 0, 0
    for seed in range(6):
        rng = random.Random(seed)
        caching, ahead = bool(seed % 2), seed // 2 % 2
        config = EngineArgs(
            model=sys.argv[1], max_num_seqs=8, max_num_batched_tokens=64, max_model_len=CONTEXT,
            enable_prefix_caching=caching, dtype="float32", skip_tokenizer_init=True,
        ).create_engine_config()  # fmt: skip
        config.scheduler_config.async_scheduling = bool(ahead)
        config.cache_config.num_gpu_blocks = 30
        ours, theirs = (Run(config, cache, 30, ahead=ahead) for cache in (Early, Theirs))
        prompts = [[rng.randrange(200) for _ in range(rng.randint(1, 70))] for _ in range(6)]
        for number in range(600):
            if number < 400 and rng.random() < 0.15:
                prompt = rng.choice(prompts)[: rng.randint(1, 70)]
                for run in (ours, theirs):
                    sampling = SamplingParams(max_tokens=1 + number % 90, ignore_eos=True)
                    run.scheduler.add_request(
                        Request(f"r{number}", prompt, sampling, None, block_hasher=hasher if caching else None)
                    )
            if number % 97 == 50 and ours.scheduler.running:
                name = ours.scheduler.running[0].request_id
                for run in (ours, theirs):
                    run.scheduler.finish_requests(name, sync_scheduler.RequestStatus.FINISHED_ABORTED)
            mine, others = ours.step(number), theirs.step(number)
            preempted += len(mine[3])
            ended += sum(reason != "None" for _, _, reason in (mine[5] if len(mine) > 5 else ()))
            if repr(mine) != repr(others):
                differ.append(f"seed {seed}, step {number}: {mine} and not {others}")
    print(json.dumps({"differ": differ[:3], "preempted": preempted, "ended": ended, "asked": dict(ASKED)}))


main()
