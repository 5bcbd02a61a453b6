"""Schedule plain decoding requests in bulk in vLLM.

consumes: the calls of vLLM's core to its scheduler at each step     waits for: nothing produces: the same answers as
vLLM's scheduler

For each request and step vLLM's scheduler checks in Python for encoders, drafts, grammars, transfers and stops, and
then adds one token. With a small model the GPU waits for that. A request is plain if its next token fits into its last
block, and if the sampled token neither ends it nor completes a block of the prefix cache. This class advances plain
requests itself. vLLM's scheduler handles all others and the step as a whole, without the plain ones. Some of its checks
are repeated here inline: one call for each request would cost what this saves.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tandem.vllm_worker.token_recorder import Unfit
from tandem.vllm_worker.urgent_first import LIMITS, QUEUES, Urgent

COMPARED = ("0.26.0", "0.32.0")
"""Versions of vLLM whose scheduler was compared with this one, step by step (tests/vllm/test_scheduled_in_bulk.py)."""

# Attributes that only some of those versions have are looked up by name.
_ODD = (
    "defer_block_free", "enable_return_routed_experts", "aux_output_connector", "is_mm_encoder_only",
    "return_sampling_mask",
)  # fmt: skip
_STALE = ("async_tokens_to_discard", "num_stale_output_tokens")
_ODD_OUTPUT = ("num_nans_in_logits", "prompt_logprobs_dict", "prompt_token_id_logprobs_dict", "kv_connector_output")

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


def going_on(kind: type[Any], version: str) -> type[Any]:
    """Return a scheduler class. `kind`: vLLM's own, of that version. Unfit if that version was not compared."""
    if (plain := version.partition("+")[0]) not in COMPARED:
        raise Unfit(f"the scheduler of vLLM {plain} was not compared")
    from vllm.v1.core.sched.interface import PauseState  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # pyright: ignore[reportMissingImports]
    from vllm.v1.request import Request, RequestStatus  # pyright: ignore[reportMissingImports]

    (stale,) = (name for name in _STALE if name in Request.__init__.__code__.co_names)
    theirs = {
        "_unpaused": PauseState.UNPAUSED, "_running": RequestStatus.RUNNING, "_stale": stale,
        "_output": EngineCoreOutput, "_outputs": EngineCoreOutputs, "_new_queue": FCFSRequestQueue,
    }  # fmt: skip
    return type("Scheduler", (GoingOn, Urgent, kind), theirs)


class GoingOn(_Base):
    """A mixin before vLLM's own scheduler class."""

    _unpaused: Any
    _running: Any
    _stale: str
    _output: Any
    _outputs: Any

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.why_not = self._why_not()
        """Why nothing is scheduled in bulk; empty if it is."""
        self._ahead = int(self.vllm_config.scheduler_config.async_scheduling)
        """How many tokens are scheduled before the previous token is known."""

    def _why_not(self) -> str:
        config, groups = self.vllm_config, self.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        if kinds != ["FullAttentionSpec"] or getattr(groups[0].kv_cache_spec, "sliding_window", None):
            return f"its cache is of {', '.join(kinds) or 'nothing'}, not of full attention alone"
        if (kind := type(self._blocks).__name__) != "FullAttentionManager":
            return f"its cache is managed by {kind}"
        if self._blocks.block_size != self._blocks.block_pool.hash_block_size:
            return "its blocks are found by prefixes of another size"
        if config.speculative_config is not None or self.num_sampled_tokens_per_step != 1:
            return "a step does not sample one token of each request"
        if config.parallel_config.pipeline_parallel_size > 1:
            return "the model is spread over pipeline stages"
        if config.kv_transfer_config is not None or getattr(config, "ec_transfer_config", None) is not None:
            return "other processes fill its caches, too"
        odd = [name for name in _ODD if getattr(self, name, None)]
        return f"vLLM was started with {odd[0]}" if odd else ""

    # --- which step is next

    def schedule(self, *args: Any, **more: Any) -> Any:
        parted = self._parted()
        if parted is None:
            return super().schedule(*args, **more)
        plain, rest = parted
        running, others = self.running, len(rest)
        budgets = {name: self.__dict__[name] for name in ("max_num_scheduled_tokens", *LIMITS) if name in self.__dict__}
        self.running = rest
        self.__dict__.update({name: budget - len(plain) for name, budget in budgets.items()})
        try:
            step = super().schedule(*args, **more)
        finally:
            self.running = running
            self.__dict__.update(budgets)
        if len(rest) < others:
            raise RuntimeError("a request was preempted while blocks were free")
        running += rest[others:]  # newly admitted requests
        self._put_in(step, plain, {each.request_id for each in rest} - step.num_scheduled_tokens.keys())
        return step

    def _parted(self) -> tuple[list[Any], list[Any]] | None:
        """Return the plain requests, and those for vLLM's scheduler; the latter include one of each adapter, because it
        counts adapters. None if it must handle all of them: blocks are short."""
        if self.why_not or self._pause_state != self._unpaused or len(self.running) > self.max_num_scheduled_tokens:
            return None
        if self.scheduler_config.long_prefill_token_threshold and any(self.__dict__.get(name) for name in QUEUES):
            return None  # how much of a prompt is computed depends on how many requests run
        running, cache, blocks = self.running, self.kv_cache_manager, self._blocks
        size, tables = blocks.block_size, blocks.req_to_blocks
        cached = blocks.num_cached_block if cache.enable_caching else None
        last = self.max_model_len - 1
        # vLLM's older runner needs full data of a request that the step before did not have.
        before = None if self.use_v2_model_runner else self.prev_step_scheduled_req_ids
        plain, rest, adapters, missing = list[Any](), list[Any](), set[Any](), 0
        for place, request in enumerate(running):
            known, ahead = len(request._all_token_ids), request.num_output_placeholders
            end = request.num_computed_tokens + 1
            if end != known + ahead or request.is_prefill_chunk or request.spec_token_ids:
                # It computes its prompt with the tokens that earlier requests leave of the budget.
                computing = running[place:]
                missing += sum((each.num_tokens + 1 - each.num_computed_tokens) // size + 2 for each in computing)
                rest += computing
                break
            name, adapter = request.request_id, request.lora_request
            if (
                end > size * len(tables[name])
                or (cached is not None and known >= size * (cached.get(name, 0) + 1))
                or end > last
                or (ahead and end + 1 - ahead >= request.num_prompt_tokens + request.max_tokens)
                or _ends(request) is None
                or (before is not None and name not in before)
            ):
                rest.append(request)
                missing += 1
            elif (number := adapter.lora_int_id if adapter else 0) not in adapters:
                adapters.add(number)
                rest.append(request)
            else:
                plain.append(request)
        return (plain, rest) if plain and missing <= cache.block_pool.get_num_free_blocks() else None

    def _put_in(self, step: Any, plain: list[Any], left_out: set[str]) -> None:
        """Add the plain requests to a step that was scheduled without them, in the order of all running requests."""
        names = [request.request_id for request in plain]
        computed = [request.num_computed_tokens for request in plain]
        made = [len(request._output_token_ids) + request.num_output_placeholders for request in plain]
        told, scheduled = step.scheduled_cached_reqs, step.num_scheduled_tokens
        told.req_ids = names + told.req_ids
        told.new_block_ids = [None] * len(plain) + told.new_block_ids
        told.num_computed_tokens = computed + told.num_computed_tokens
        told.num_output_tokens = made + told.num_output_tokens
        running = [request.request_id for request in self.running]
        step.num_scheduled_tokens = {name: scheduled.get(name, 1) for name in running if name not in left_out}
        step.total_num_scheduled_tokens += len(plain)
        if getattr(step, "num_common_prefix_blocks", None):
            step.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(running[0])
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._ahead

    # --- what a step has sampled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step, output = scheduler_output, model_runner_output
        if (
            self.why_not
            or not output.sampled_token_ids
            or any(getattr(output, name, None) for name in _ODD_OUTPUT)
            or (self.perf_metrics and self.perf_metrics.is_enabled())
        ):
            return super().update_from_output(step, output)
        news, rest = self._went_on(step.num_scheduled_tokens, output)
        step = copy.copy(step)
        step.num_scheduled_tokens = rest
        answers = super().update_from_output(step, output)
        for client, told in news.items():
            if client in answers:
                answers[client].outputs = told + answers[client].outputs
            else:
                answers[client] = self._outputs(outputs=told)
        return answers

    def _went_on(self, scheduled: dict[str, int], output: Any) -> tuple[dict[int, list[Any]], dict[str, int]]:
        """Return the outputs of plain requests by client, and the requests for vLLM's scheduler. The latter include the
        first plain one: the first client in the answer also gets the statistics of the step."""
        sampled, places, requests = output.sampled_token_ids, output.req_id_to_index, self.requests
        size, longest, stale = self._blocks.block_size, self.max_model_len, self._stale
        # With async scheduling, blocks are cached when their tokens are known; else when they were scheduled.
        cached = self._blocks.num_cached_block if self._ahead and self.kv_cache_manager.enable_caching else None
        news, rest, is_first = defaultdict[int, list[Any]](list), dict[str, int](), True
        for name, count in scheduled.items():
            request, ids = requests.get(name), sampled[places[name]]
            if (
                count != 1
                or request is None
                or len(ids) != 1
                or request.status is not self._running
                or (ends := _ends(request)) is None
                or ids[0] in ends
                or len(request._output_token_ids) + 1 >= request.max_tokens
                or len(request._all_token_ids) + 1 >= longest
                or (ahead := request.num_output_placeholders) < self._ahead
                or (cached is not None and request.num_computed_tokens - ahead + 1 >= size * (cached.get(name, 0) + 1))
                or request.prefill_stats is not None
                or request.events
                or getattr(request, stale)
            ):
                rest[name] = count
                continue
            if is_first:
                is_first, rest[name] = False, count
                continue
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders = ahead - self._ahead
            request.append_output_token_ids(ids[0])
            news[request.client_index].append(self._output(request_id=name, new_token_ids=ids))
        return news, rest

    @property
    def _blocks(self) -> Any:
        return self.kv_cache_manager.coordinator.single_type_managers[0]


def _ends(request: Any) -> frozenset[Any] | None:
    """Return the tokens that end a request. None if anything else can end it, or if clients get more than tokens.
    Computed once a request."""
    try:
        return request._tandem_ends
    except AttributeError:
        pass
    sampling = request.sampling_params
    ends = None if _is_odd(request) else frozenset({*(sampling.stop_token_ids or ()), sampling.eos_token_id})
    request._tandem_ends = ends
    return ends


def _is_odd(request: Any) -> bool:
    sampling = request.sampling_params
    return bool(
        sampling is None
        or sampling.num_logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.repetition_detection is not None
        or request.pooling_params is not None
        or request.structured_output_request is not None
        or request.mm_features
        or request.trace_headers is not None
        or request.resumable
        or getattr(request, "spec_decode_metrics", None) is not None
    )
