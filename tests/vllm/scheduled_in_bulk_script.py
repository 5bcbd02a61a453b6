"""Run by vLLM's interpreter: its scheduler, twice, over the same requests: its own, and one that takes those that go on
in bulk. All that a step says is compared, and all that is left after it. Where some requests are urgent both let them
go first, and it is seen to that nobody comes before them. Arguments: a model, how many settings, steps of each. Prints
what differed, and how much of what happened."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections import Counter, deque
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.config import LoRAConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tandem.ops.vllm_token_protocol import URGENT, URGENT_PLACES
from tandem.vllm_worker.bulk_scheduling import going_on
from tandem.vllm_worker.urgent_first import QUEUES, Urgent
from vllm import __version__

BLOCK, CONTEXT, EOS = 16, 128, 50
HAPPENED: Counter[str] = Counter()
# Of a request, whatever a step may change. Each version has one of the last two.
OF_REQUEST = (
    "num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "is_prefill_chunk", "num_preemptions",
    "stop_reason", "spec_token_ids", "_all_token_ids", "_output_token_ids", "async_tokens_to_discard",
    "num_stale_output_tokens",
)  # fmt: skip
OF_SCHEDULER = (
    "current_step", "prefill_capacity_bound", "max_num_running_reqs", "max_num_scheduled_tokens", "finished_req_ids",
    "prev_step_scheduled_req_ids",
)  # fmt: skip


class Logprobs:
    """As much of vLLM's as the scheduler asks for."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self._tokens = tokens

    def slice_request(self, place: int, count: int) -> list[float]:
        return [token / 7 for token in self._tokens[place][:count]]


def told_of(value: Any) -> str:
    """As it is now. The order of a set says nothing."""
    return repr(sorted(value) if isinstance(value, set) else value)


class Run:
    def __init__(self, setting: dict[str, Any], config: Any, *, in_bulk: bool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        kind: Any = AsyncScheduler if setting["ahead"] else Scheduler
        ours = going_on(kind, __version__)
        if in_bulk:
            kind = ours
        elif setting["urgent"]:
            kind = type("Scheduler", (Urgent, kind), {"_new_queue": FCFSRequestQueue})
        self.scheduler = kind(
            vllm_config=config, structured_output_manager=StructuredOutputManager(config), block_size=BLOCK,
            kv_cache_config=KVCacheConfig(num_blocks=setting["blocks"], kv_cache_tensors=[], kv_cache_groups=groups),
            log_stats=setting["log_stats"], include_finished_set=setting["tells_finished"],
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = setting["younger_runner"]
        self.under_way: deque[Any] = deque()
        self.stood, self.has_room = 0, setting["blocks"] == 200
        self.events: list[str] = []
        self.scheduler.kv_event_publisher = self
        if in_bulk:
            assert not self.scheduler.why_not
            self.put_in, self.scheduler._put_in = self.scheduler._put_in, self._counted

    def publish(self, batch: Any) -> None:
        """In a publisher's place."""
        self.events += map(repr, batch.events)

    def _counted(self, step: Any, plain: list[Any], left_out: set[str]) -> None:
        HAPPENED["went on"] += len(plain)
        HAPPENED["went on beside others"] += len(plain) if step.scheduled_new_reqs else 0
        self.put_in(step, plain, left_out)

    def schedule(self, throttled: bool) -> Any:
        urgent = {name for name in self.scheduler.requests if name.startswith("u")}
        waiting = urgent - {each.request_id for each in self.scheduler.running}
        before = [name for name in self.queued() if name not in urgent]
        step = self.scheduler.schedule(throttled)
        after = self.queued()
        running = [each.request_id for each in self.scheduler.running]
        assert sorted(after + running) == sorted(self.scheduler.requests)
        if in_line := getattr(self.scheduler, "_urgent", None):
            assert in_line <= urgent  # else nobody would be let in any more
        if urgent:
            assert [name for name in after if name in before] == before  # and nobody moved
            cached = step.scheduled_cached_reqs
            admitted = {each.req_id for each in step.scheduled_new_reqs} | set(cached.resumed_req_ids)
            HAPPENED["urgent"] += len(admitted & urgent)
            HAPPENED["overtaken"] += len(admitted - urgent)
            may = not throttled and self.scheduler.pause_state == PauseState.UNPAUSED and len(urgent) == 1
            self.stood = self.stood + 1 if may and waiting - admitted else 0
            HAPPENED["stood"] = max(HAPPENED["stood"], self.stood if self.has_room else 0)
        if step.total_num_scheduled_tokens:
            samples = {name: not self.scheduler.requests[name].is_prefill_chunk for name in step.num_scheduled_tokens}
            self.under_way.append((step, samples))
        HAPPENED["scheduled"] += len(step.num_scheduled_tokens)
        HAPPENED["preempted"] += len(step.preempted_req_ids or ())
        told: dict[str, Any] = {field.name: told_of(getattr(step, field.name)) for field in dataclasses.fields(step)}
        cached = vars(step.scheduled_cached_reqs) | {}
        names = cached.pop("req_ids")
        columns = [cached.pop(name) for name in ("new_block_ids", "num_computed_tokens", "num_output_tokens")]
        told["scheduled_cached_reqs"] = dict(zip(names, zip(*columns, strict=True), strict=True)), cached
        told["scheduled_new_reqs"] = [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs]
        return told

    def queued(self) -> list[str]:
        return [each.request_id for name in QUEUES for each in getattr(self.scheduler, name, ())]

    def update(self, number: int, order: random.Random) -> Any:
        step, samples = self.under_way.popleft()
        names = list(step.num_scheduled_tokens)
        order.shuffle(names)
        tokens = [[(number + 7 * int(name[1:])) % 200] if samples[name] else [] for name in names]
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, pooler_output=[],
            sampled_token_ids=tokens, logprobs=Logprobs(tokens), prompt_logprobs_dict={},
        )  # fmt: skip
        answers = self.scheduler.update_from_output(step, output)
        told = [(client, *self._told(each)) for client, answer in answers.items() for each in answer.outputs]
        HAPPENED.update(reason for *_, reason in told)
        finished = {client: sorted(answer.finished_requests or ()) for client, answer in answers.items()}
        stats = {client: repr(answer.scheduler_stats) for client, answer in answers.items()}
        return sorted(map(repr, told)), finished, stats

    @staticmethod
    def _told(output: Any) -> list[Any]:
        events = [each.type for each in output.events or ()]
        return [
            output.request_id, output.new_token_ids, output.new_logprobs, output.stop_reason, output.prefill_stats,
            events, str(output.finish_reason),
        ]  # fmt: skip

    def left(self) -> Any:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        blocks = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        return {
            "requests": {
                name: [str(each.status), len(each.block_hashes), *(getattr(each, key, None) for key in OF_REQUEST)]
                for name, each in scheduler.requests.items()
            },
            "scheduler": [told_of(getattr(scheduler, name, None)) for name in OF_SCHEDULER],
            "running": [each.request_id for each in scheduler.running],
            "waiting": [each.request_id for each in scheduler.waiting],
            "free": [each.block_id for each in pool.free_block_queue.get_all_free_blocks()],
            "references": [each.ref_cnt for each in pool.blocks],
            "tables": {name: [each.block_id for each in row] for name, row in blocks.req_to_blocks.items()},
            "cached": dict(blocks.num_cached_block),
            "events": self.events,
        }


def some_setting(rng: random.Random) -> dict[str, Any]:
    either = [True, False]
    return {name: rng.choice(either) for name in ("ahead", "younger_runner", "log_stats", "tells_finished")} | {
        "caching": rng.random() < 0.7, "priority": rng.random() < 0.3, "adapters": rng.random() < 0.5,
        "throttled": rng.random() < 0.25, "resets": rng.random() < 0.5, "blocks": rng.choice([24, 30, 60, 200]),
        "sequences": rng.choice([4, 8, 16]), "tokens": rng.choice([32, 64, 256]), "clients": rng.choice([1, 2]),
        "urgent": rng.random() < 0.4, "fewer": rng.random() < 0.3, "threshold": 20 if rng.random() < 0.2 else 0,
        "shared": rng.choice(either),
    }  # fmt: skip


def config_of(setting: dict[str, Any], model: str, kept: int) -> Any:
    """`kept`: places that its scheduler keeps for who is urgent."""
    config = EngineArgs(
        model=model, max_num_seqs=setting["sequences"] + kept, max_num_batched_tokens=setting["tokens"],
        dtype="float32", max_model_len=CONTEXT, enable_prefix_caching=setting["caching"], skip_tokenizer_init=True,
        scheduling_policy="priority" if setting["priority"] else "fcfs",
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = setting["ahead"]
    config.scheduler_config.long_prefill_token_threshold = setting["threshold"]
    if setting["fewer"]:
        config.scheduler_config.max_num_scheduled_tokens = setting["sequences"] // 2
    if setting["adapters"]:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=4)
    config.cache_config.num_gpu_blocks = setting["blocks"]
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


class Arrivals:
    """The same requests for both."""

    def __init__(self, setting: dict[str, Any], rng: random.Random) -> None:
        self.setting, self.rng, self.count = setting, rng, 0
        base = [rng.randrange(200) for _ in range(60)]
        self.prompts = [
            [*base[: 60 if setting["shared"] else rng.randint(0, 50)], *(rng.randrange(200) for _ in range(end))]
            for end in ([1] * 6 if setting["shared"] else [rng.randint(1, 30) for _ in range(6)])
        ]

    def one(self) -> list[Request]:
        rng, setting = self.rng, self.setting
        is_urgent = setting["urgent"] and rng.random() < 0.1
        name = f"{'u' if is_urgent else 'r'}{self.count}"
        self.count += 1
        prompt, most = rng.choice(self.prompts), rng.choice([1, 2, 17, 40, 90, 200])
        ends = [rng.randrange(200), 77] if rng.random() < 0.5 else []
        adapter = (
            LoRARequest(f"a{number}", number, "/x") if setting["adapters"] and (number := rng.randrange(4)) else None
        )
        told: dict[str, Any] = {
            "client_index": rng.randrange(setting["clients"]), "arrival_time": float(self.count),
            "lora_request": adapter, "cache_salt": rng.choice([None, "salt"]),
            "priority": rng.randrange(3) if setting["priority"] else 0,
            "block_hasher": HASHER if setting["caching"] else None,
        }  # fmt: skip
        least, logprobs = min(most, rng.choice([0, 5])), 0 if rng.random() < 0.1 else None
        requests = list[Request]()
        for _ in range(2):
            sampling = SamplingParams(
                max_tokens=most, min_tokens=least, stop_token_ids=ends, logprobs=logprobs,
                extra_args={URGENT: True} if is_urgent else None,
            )  # fmt: skip
            sampling._eos_token_id = EOS if self.count % 2 else None
            requests.append(Request(name, list(prompt), sampling, None, **told))
        return requests


def compared(model: str, seed: int, steps: int) -> list[str]:
    rng = random.Random(seed)
    setting = some_setting(rng)
    runs = [
        Run(setting, config_of(setting, model, URGENT_PLACES if in_bulk or setting["urgent"] else 0), in_bulk=in_bulk)
        for in_bulk in (True, False)
    ]
    arrivals, pause = Arrivals(setting, rng), PauseState.UNPAUSED

    def now_and_then_abort() -> None:
        if rng.random() < 0.03 and runs[0].scheduler.requests:
            name = rng.choice(sorted(runs[0].scheduler.requests))
            for run in runs:
                run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    for number in range(steps):
        if number < steps * 0.7 and rng.random() < 0.25:
            for _ in range(rng.choice([1, 1, 4])):
                for run, request in zip(runs, arrivals.one(), strict=True):
                    run.scheduler.add_request(request)
        now_and_then_abort()
        if rng.random() < (0.3 if pause != PauseState.UNPAUSED else 0.02):
            paused = rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
            pause = PauseState.UNPAUSED if pause != PauseState.UNPAUSED else paused
        resets = setting["resets"] and rng.random() < 0.02
        for run in runs:
            run.scheduler.set_pause_state(pause)
            if resets:
                run.scheduler.reset_prefix_cache(reset_running_requests=True)
        told = [[run.schedule(setting["throttled"] and number % 4 != 0)] for run in runs]
        now_and_then_abort()
        if len(runs[0].under_way) > setting["ahead"] or (runs[0].under_way and rng.random() < 0.5):
            order = rng.random()
            for run, row in zip(runs, told, strict=True):
                row.append(run.update(number, random.Random(order)))
        mine, others = [[*row, run.left()] for run, row in zip(runs, told, strict=True)]
        if mine != others:
            return [f"seed {seed}, {setting}, step {number}: {_parts(mine, others)}"]
    return []


def _parts(mine: list[Any], others: list[Any]) -> list[Any]:
    odd: list[Any] = []
    for one, other in zip(mine, others, strict=True):
        if isinstance(one, dict):
            odd += [(name, one[name], other[name]) for name in one if one[name] != other[name]]
        elif one != other:
            odd.append((one, other))
    return odd


HASHER: Any = get_request_block_hasher(BLOCK, sha256)


def main() -> None:
    init_none_hash(sha256)
    model, settings, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    differ = [found for seed in range(settings) for found in compared(model, seed, steps)]
    print(json.dumps({"differ": [each[:3000] for each in differ[:3]], "odd": len(differ), **HAPPENED}))


main()
