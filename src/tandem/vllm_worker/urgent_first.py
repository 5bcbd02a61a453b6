"""A request that somebody stands still for goes before all others through vLLM's scheduler.

consumes: requests, of which some are marked     waits for: nothing
produces: steps of whoever runs, and of nobody else who waits until those that are marked have ended

A canary is two tokens, and a trainer waits for them. Behind a full engine's queue that would be as long as answers are;
behind requests that go on under a new version, as long as all of them take to be computed anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.ops.vllm_token_protocol import URGENT, URGENT_PLACES

# What only some versions have is looked for by name.
LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class Urgent(_Base):
    """Before vLLM's own among a scheduler's classes."""

    _new_queue: Any

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._urgent: set[str] = set()
        self._let_run(-URGENT_PLACES)

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        sampling = request.sampling_params
        if sampling is not None and (sampling.extra_args or {}).get(URGENT):
            self._urgent.add(request.request_id)

    def schedule(self, *args: Any, **more: Any) -> Any:
        self._urgent &= self.requests.keys()
        if not self._urgent:
            return super().schedule(*args, **more)
        queues = {name: self.__dict__[name] for name in QUEUES if name in self.__dict__}
        first = [each for queue in queues.values() for each in queue if each.request_id in self._urgent]
        for queue in queues.values():
            queue.remove_requests(first)
        self.__dict__.update({name: self._new_queue() for name in queues})
        for each in first:
            self.waiting.add_request(each)
        self._let_run(URGENT_PLACES)
        try:
            return super().schedule(*args, **more)
        finally:
            self._let_run(-URGENT_PLACES)
            for name, queue in queues.items():
                for each in reversed([*self.__dict__[name]]):  # who had no room after all, and who had to make room
                    queue.prepend_request(each)
                self.__dict__[name] = queue

    def _let_run(self, more: int) -> None:
        self.__dict__.update({name: self.__dict__[name] + more for name in LIMITS if name in self.__dict__})
