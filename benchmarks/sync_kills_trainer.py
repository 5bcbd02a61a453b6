"""The trainer of sync_kills.py, a process of its own: it publishes one version after another until a signal ends it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_S, DEADLINE_S, LEASE_S = 90.0, 5.0, 3.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
_MOVE = 0.02  # standard deviation of a round's change of the weights: enough to tell any two versions by one logprob


class Journal(logging.Handler):
    """What happens, a line of JSON each, written at once: its process may be killed at the next instruction."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"what": what, "at": time.time(), **fields}).encode() + b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.write("warning", logger=record.name, text=record.getMessage())


def spec_of(mode: str, model: Path, engine: Mapping[str, Any]) -> Any:
    from tandem.spec.load import parse_spec

    adapters = mode in ("adapter", "adapter_broadcast")
    deadline_s = START_S if mode == "restart" else DEADLINE_S
    files = {"directory": str(model.parent)} if mode == "adapter" else {}
    return parse_spec(
        {
            "recipe": "rl",
            "name": "sync-kills",
            "device": "cpu",
            "model": {"path": str(model), **({"lora": {"rank": 4}} if adapters else {})},
            "precision": {"weights": "float32"},
            "environment": {"name": "guess"},
            "engine": {"kind": "server", "max_context": 128, **engine},
            "sync": {"bridge": mode, "deadline_s": deadline_s, **files},
            "train": {"steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 8},
        }
    )


def train(mode: str, home: Path, number: int, version: int, engine: Mapping[str, Any]) -> int:
    journal = Journal(home / f"trainer-{number}.jsonl")
    logging.getLogger("tandem").addHandler(journal)
    from tandem.build import built_model
    from tandem.errors import TandemError

    spec = spec_of(mode, home / "model", engine)
    model = built_model.run_model(spec, None)
    try:
        asyncio.run(publish_for_ever(spec, model, home, number, version, journal))
    except TandemError as error:
        journal.write("ended", error=type(error).__name__, text=str(error))
        return 1
    return 0


async def publish_for_ever(spec: Any, model: Any, home: Path, number: int, version: int, journal: Journal) -> None:
    from tandem.build import run_engines, training
    from tandem.engine.pool import EnginePool
    from tandem.engine.server.engine import ExistingServer, ServerEngine
    from tandem.errors import EngineError, SyncError

    own = home / f"run-{number}"
    bridge = run_engines.bridge(spec, model, own, home / "model")
    if spec.engine.url:
        place = ExistingServer(spec.engine.url, Path(spec.engine.token_file))
        shares = spec.sync.bridge == "shared"
        engine = EnginePool([ServerEngine(place, deadline_s=DEADLINE_S, shares_memory=shares, lease_s=LEASE_S)])
    else:
        engine = run_engines.outside(spec, model, own)
    joined = run_engines.Joined(engine, bridge, spec.sync.retries)
    publisher = run_engines.publisher(joined, model, spec.sync.deadline_s, training.caller(False))
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, spec.seed)
    rng = random.Random(version)
    announce(model, trainer, 0, journal)  # what an engine serves from the start
    trainer.version = version
    while True:
        async with publisher.lock:
            move_weights(model, trainer.version)
            announce(model, trainer, trainer.version, journal)
        while True:
            try:
                proof = await publisher.publish(trainer)
                break
            except (EngineError, SyncError) as error:
                journal.write("error", error=type(error).__name__, text=str(error))
        journal.write("proof", version=proof.version, attempts=proof.attempts, digest=proof.digest)
        await asyncio.sleep(rng.uniform(0.0, 0.2))
        while True:  # as before an optimizer step: nothing is written before the engine has lent its memory
            try:
                await publisher.rest(trainer)
                break
            except (EngineError, SyncError) as error:
                journal.write("error", error=type(error).__name__, text=str(error))
        trainer.version += 1


def move_weights(model: Any, version: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for _, tensor in model.policy.trainable():
            tensor += _MOVE * torch.randn(tensor.shape, generator=generator)


def announce(model: Any, trainer: Any, version: int, journal: Journal) -> None:
    """Before it is sent. Of adapters the digest is the base's: engines keep them beside the model."""
    import torch

    from tandem.ops.digest import fingerprints
    from tandem.ops.named_tensors import live_tensors

    adapters = any(".lora_" in name for name, _ in model.policy.module.named_parameters())
    tensors = trainer.base() if adapters else live_tensors(model.policy.module)
    with torch.no_grad():
        logits_V = model.policy.module(torch.tensor([PROMPT])).logits[0, -1, : model.num_ids].float()
    logprobs_V = logits_V.log_softmax(-1)
    best = int(logprobs_V.argmax())
    journal.write(
        "announced",
        version=version,
        digest=all_in_one(fingerprints(dict(tensors))),
        greedy=[best, float(logprobs_V[best])],
    )


def all_in_one(fingerprints: Mapping[str, str]) -> str:
    text = "\n".join(f"{name} {fingerprint}" for name, fingerprint in sorted(fingerprints.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    sys.exit(train(told["mode"], Path(told["home"]), told["number"], told["version"], told["engine"]))
