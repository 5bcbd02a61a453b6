"""Methods that vLLM adds to each of its workers (`--worker-extension-cls`), called through `/collective_rpc`.

vLLM's own weight-transfer engines return nothing, so no digest could come back, and they differ between versions.
Arguments and answers here are plain JSON. A failure is an answer, too: an exception that leaves a worker may end the
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import EngineError, SyncError, SyncTimeout
from tandem.vllm_worker.lora_layers import compute_beside, fit_blocks
from tandem.vllm_worker.spared_experts import spare_experts
from tandem.vllm_worker.token_recorder import Reading, RecordedTokens, Unfit, keep_sampled
from tandem.vllm_worker.unpacked_cpu_weights import keep_weights_plain
from tandem.vllm_worker.worker import Answer, EngineWorker

_log = logging.getLogger(__name__)


class TandemWorker:
    """Mixed into vLLM's worker class: `self` is vLLM's worker."""

    def tandem_vocabulary(self, num_ids: int) -> Answer:
        return _answer(lambda: _worker_of(self).vocabulary(num_ids))

    def tandem_attach(self, link: dict[str, Any]) -> Answer:
        return _answer(lambda: {**_worker_of(self).attach(link), "why_not": _WHY_NOT})

    def tandem_stage(self, version: int, patience_s: float) -> Answer:
        return _answer(lambda: _worker_of(self).stage(version, patience_s))

    def tandem_load(self, version: int, into: str = "", patience_s: float | None = None, later: bool = False) -> Answer:
        return _answer(lambda: _load(self, version, into, patience_s, later))

    def tandem_proof(self, version: int) -> Answer:
        return _answer(lambda: _worker_of(self).proof(version))

    def tandem_adapter(self, name: str) -> Answer:
        return _answer(lambda: _worker_of(self).adapter(name))

    def tandem_put(self, path: str, rank: int, expected: dict[str, str]) -> Answer:
        """Stage an adapter of its own name for vLLM to load; see engine/vllm/named_adapters.py."""
        return _answer(lambda: _worker_of(self).put(path, rank, expected))

    def tandem_drop(self, name: str) -> Answer:
        return _answer(lambda: _worker_of(self).drop(name))

    def tandem_digest(self) -> Answer:
        return _answer(lambda: _worker_of(self).digest())

    def tandem_remember(self, adapters: Sequence[str] = ()) -> Answer:
        return _answer(lambda: _worker_of(self).remember(adapters))

    def tandem_intact(self, adapters: Sequence[str] = ()) -> Answer:
        return _answer(lambda: _worker_of(self).intact(adapters))

    def tandem_free_bytes(self) -> Answer:
        return _answer(lambda: _worker_of(self).free_bytes())

    def tandem_status(self) -> Answer:
        return _answer(lambda: _worker_of(self).status())

    def tandem_keep(self, version: int) -> Answer:
        """Start to record tokens and logprobs of marked requests, for `tandem_sampled`. `version`: the served one. A
        second call changes nothing."""
        return _answer(lambda: _keep(self, version))

    def tandem_sampled(self, running: Reading, ended: Reading, dropped: Sequence[str]) -> Answer:
        return _answer(lambda: {"news": _keeping(self).read(running, ended, dropped)})

    def tandem_keeping(self) -> Answer:
        return _answer(lambda: {"unread": len(_keeping(self)), "under_way": _keeping(self).under_way})


def _worker_of(theirs: Any) -> EngineWorker:
    """Return our worker; the first call makes it, because the model must be loaded before."""
    if not hasattr(theirs, "_tandem"):
        theirs._tandem = EngineWorker(theirs)
    return theirs._tandem


def _load(theirs: Any, version: int, *how: Any) -> Answer:
    answer = _worker_of(theirs).load(version, *how)
    if answer["arrived"] and "adapter" not in answer and hasattr(theirs, "_tandem_kept"):
        theirs._tandem_kept.serve(version)
    return answer


def _keep(theirs: Any, version: int) -> Answer:
    def keep() -> None:
        theirs._tandem_kept = keep_sampled(theirs.model_runner, theirs.vllm_config, version)

    return {"why_not": "" if hasattr(theirs, "_tandem_kept") else _why_not(keep)}


def _why_not(work: Callable[[], None]) -> str:
    try:
        work()
    except Unfit as error:
        return str(error)
    return ""


def _keeping(theirs: Any) -> RecordedTokens:
    if not hasattr(theirs, "_tandem_kept"):
        raise EngineError("engine: sampled tokens are not recorded; call tandem_keep first")
    return theirs._tandem_kept


def _answer(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except SyncTimeout as error:
        return _refusal("sync_timeout", error)
    except SyncError as error:
        return _refusal("sync", error)
    except EngineError as error:
        return _refusal("engine", error)
    except Exception as error:  # noqa: BLE001  see above
        _log.exception("a call of the trainer failed")
        return {"error": {"code": "engine", "message": f"engine: {type(error).__name__}: {error}"}}


def _refusal(code: str, error: Exception) -> Answer:
    return {"error": {"code": code, "message": str(error)}}


# vLLM imports this module when it makes a worker. There is no other hook before the model is loaded.
keep_weights_plain()
spare_experts()
_WHY_NOT = {"beside": _why_not(compute_beside), "blocks": _why_not(fit_blocks)}
