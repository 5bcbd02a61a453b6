"""Schedule urgent requests before all waiting ones in vLLM.

consumes: requests, some of them marked as urgent     waits for: nothing produces: steps; while an urgent request is
there, no other waiting request starts

A canary is two tokens, and the trainer waits for them. Behind a full queue that would take as long as the answers;
behind requests that continue under a new version, as long as it takes to recompute all of their keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.ops.vllm_token_protocol import URGENT, URGENT_PLACES

# Attributes that only some versions of vLLM have are looked up by name.
LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class Urgent(_Base):
    """A mixin before vLLM's own scheduler class."""

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
                for each in reversed(
                    [*self.__dict__[name]]
                ):  # urgent requests that did not fit, and preempted requests
                    queue.prepend_request(each)
                self.__dict__[name] = queue

    def _let_run(self, more: int) -> None:
        self.__dict__.update({name: self.__dict__[name] + more for name in LIMITS if name in self.__dict__})
