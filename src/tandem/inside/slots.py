"""The next token's place among keys and values, found at once where it is plain.

consumes: what vLLM's scheduler asks its cache manager of a running request     waits for: nothing
produces: the answer that it would get anyway

For each request and step vLLM goes through which blocks can be given back, how many are missing, and which became full:
a third of its scheduler's time, and that is what a small model's decoding waits for (docs/LOG.md). While a request's
last block has room the answers are none, none and none. That one case is answered here; for all else, and wherever a
cache is of more than full attention, the manager is asked as before.
"""

from __future__ import annotations

from typing import Any

from tandem.inside.sampling import Unfit

_NEXT = {"num_lookahead_tokens": 0}
"""What the scheduler asks with, beside request and number of tokens, for a request that runs without speculation."""


def has_room(cache: Any, request: Any) -> bool:
    """One token more takes no block, and completes none that could be found by its prefix. `cache`: vLLM's manager."""
    blocks = cache.coordinator.single_type_managers[0]
    name, size, end = request.request_id, blocks.block_size, request.num_computed_tokens + 1
    if end > cache.max_model_len or end > size * len(blocks.req_to_blocks.get(name, ())):
        return False
    return not cache.enable_caching or not _completes(blocks, name, min(end, request.num_tokens))


def _completes(blocks: Any, name: str, num_tokens: int) -> bool:
    return num_tokens >= blocks.block_size * (blocks.num_cached_block.get(name, 0) + 1)


def answer_early(worker: Any) -> None:
    """From now on, in this process. Unfit if that cannot be. Again: as before."""
    try:
        if why_not := _why_not(worker.vllm_config, worker.model_runner.kv_cache_config.kv_cache_groups):
            raise Unfit(why_not)
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # pyright: ignore[reportMissingImports]

        engage(KVCacheManager)
    except (AttributeError, ImportError) as error:
        raise Unfit(f"this vLLM's cache is managed otherwise: {error}") from error


def _why_not(config: Any, groups: Any) -> str:
    if config.parallel_config.distributed_executor_backend != "uni":
        return "vLLM's scheduler is in another process than its workers"
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"] or getattr(groups[0].kv_cache_spec, "sliding_window", None):
        return f"its cache is of {', '.join(kinds) or 'nothing'}, not of full attention alone"
    if config.speculative_config is not None:
        return "speculative decoding asks for several slots at once"
    return "its cache is filled by others, too" if config.kv_transfer_config else ""


def engage(cache_class: Any) -> None:
    """`cache_class`: vLLM's KVCacheManager."""
    if getattr(cache_class, "answers_early", False):
        return
    allocate, keep = cache_class.allocate_slots, cache_class.cache_blocks

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **more: Any) -> Any:
        if num_new_tokens == 1 and more == _NEXT and not args and _plain(self) and has_room(self, request):
            return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **more)

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        if not _plain(self) or _completes(
            self.coordinator.single_type_managers[0], request.request_id, num_computed_tokens
        ):
            keep(self, request, num_computed_tokens)

    cache_class.allocate_slots, cache_class.cache_blocks = allocate_slots, cache_blocks
    cache_class.answers_early = True


def _plain(cache: Any) -> bool:
    """Looked at once."""
    found = cache.__dict__.get("_tandem_plain")
    if found is None:
        managers = cache.coordinator.single_type_managers
        found = len(managers) == 1 and type(managers[0]).__name__ == "FullAttentionManager"
        found = found and managers[0].block_size == getattr(managers[0].block_pool, "hash_block_size", 0)
        cache._tandem_plain = found
    return found
