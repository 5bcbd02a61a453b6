"""One of two engines is killed while a version is on its way to both, over a bridge that gives it to all or to none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from stopwatch import Stopwatch
from tandem.build import built_model, run_engines, training
from tandem.recipes import sync_bench
from tandem.spec.load import with_values
from tandem.spec.run import RlSpec

pytestmark = pytest.mark.usefixtures("one_thread", "forked_programs")


@pytest.mark.parametrize("bridge", ["broadcast", "adapter_broadcast"])
def test_the_other_engine_has_the_version_long_before_the_deadline(bridge: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = sync_bench.bench_spec(bridge, "tiny", "cpu", "server", tmp_path, {"replicas": 2})
        spec = cast("RlSpec", with_values(spec, {"sync": {"retries": 1, "deadline_s": 600.0}}))
        model = built_model.model(spec.model, spec.precision, spec.seed, built_model.settle_torch(spec))
        joined = run_engines.join(spec, model, tmp_path, unchecked=True)
        publisher = run_engines.publisher(joined, model, spec.sync.deadline_s, training.caller(False))
        trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, spec.seed)
        try:
            await publisher.publish(trainer)
            sync_bench.move_weights(model, trainer)
            assert len((await publisher.publish(trainer)).engines) == 2
            pid: int = json.loads((tmp_path / "engine-1" / "ready.json").read_text())["pid"]
            os.kill(pid, signal.SIGSTOP)  # so that the version is surely on its way when the engine is killed
            sync_bench.move_weights(model, trainer)
            publishing = asyncio.ensure_future(publisher.publish(trainer))
            await asyncio.sleep(1)
            assert not publishing.done()
            os.kill(pid, signal.SIGKILL)
            with Stopwatch() as watch:
                proof = await publishing
            assert (proof.version, proof.attempts) == (trainer.version, 2)
            assert watch.seconds < 60
        finally:
            await joined.engine.close()
            joined.bridge.close()

    asyncio.run(scenario())
