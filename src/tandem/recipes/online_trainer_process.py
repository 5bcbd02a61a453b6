"""The trainer process of an online server, as a program: `python -m tandem.recipes.online_trainer_process FD`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from tandem.build import online
from tandem.online.messages import Asked
from tandem.online.publishing import EngineProxy
from tandem.online.rpc import RpcConnection
from tandem.online.trainer_worker import TrainerParts, TrainerWorker
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.online import OnlineSpec


async def serve(end: socket.socket) -> None:
    """Until the server process closes its end."""

    async def handle(what: Asked) -> dict[str, Any]:
        return await half.handle(what)

    def make_parts(spec: OnlineSpec) -> TrainerParts:
        receivers = spec.engine.tensor_parallel if isinstance(spec.engine, VllmEngineSpec) else 1
        return online.parts(spec, EngineProxy(server.ask, receivers))

    server = RpcConnection(handle, "server process")
    half = TrainerWorker(make_parts, server.tell)
    await server.start(end)
    await server.gone.wait()


def main() -> None:
    from tandem.io.leash import die_with

    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server process's to deal with
    os.nice(10)  # who waits for an answer goes first
    asyncio.run(_until_the_end(socket.socket(fileno=int(sys.argv[1]))))


async def _until_the_end(end: socket.socket) -> None:
    await serve(end)
    os._exit(0)  # whatever is trained at this moment was not asked for by anybody any more


if __name__ == "__main__":
    main()
