"""Make vLLM's scheduler (`--scheduler-cls`): its own, with bulk scheduling and urgent requests added.

consumes: the arguments of vLLM's scheduler     waits for: nothing
produces: the scheduler; in the file that an environment variable names, why it is not sped up

vLLM's core may run in another process than its workers, where no call of ours reaches it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tandem.ops.vllm_token_protocol import SCHEDULER_TOLD
from tandem.vllm_worker.bulk_scheduling import going_on
from tandem.vllm_worker.token_recorder import Unfit


def scheduler(vllm_config: Any, kv_cache_config: Any, **more: Any) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

    from vllm import __version__  # pyright: ignore[reportMissingImports]

    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    asked = {"vllm_config": vllm_config, "kv_cache_config": kv_cache_config, **more}
    try:
        made = going_on(kind, __version__)(**asked)
        why_not = made.why_not
    except Unfit as error:
        made, why_not = kind(**asked), str(error)
    if path := os.environ.get(SCHEDULER_TOLD):
        Path(path).write_text(json.dumps({"why_not": why_not}), encoding="utf-8")
    return made
