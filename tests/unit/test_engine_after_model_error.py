"""An embedded engine that was stopped by an error of its model refuses every later request with that error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import EngineError
from tandem.model.presets import make_model
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_is_lost_and_every_later_refusal_names_the_first_error() -> None:
    async def work() -> None:
        module: Any = make_model("tiny", byte_tokenizer(), seed=0)
        engine = EmbeddedEngine(module, num_ids=256, end_ids=frozenset(), decode=str, max_running=4)
        losing = asyncio.create_task(engine.lost())
        await engine.generate([1, 2], Sampling(max_tokens=1))
        assert not losing.done()
        module.get_input_embeddings().register_forward_pre_hook(broken)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"stopped.*RuntimeError: out of memory"):
                await engine.generate([1, 2], Sampling(max_tokens=1))
        await asyncio.wait_for(losing, 10)
        await engine.close()

    asyncio.run(work())


def broken(*_: Any) -> Any:
    raise RuntimeError("out of memory")
