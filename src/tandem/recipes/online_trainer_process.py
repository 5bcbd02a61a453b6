"""The trainer process of an online server, as a program: `python -m tandem.recipes.online_trainer_process FD`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from tandem.build import online
from tandem.online.messages import RpcCall
from tandem.online.publishing import EngineProxy
from tandem.online.rpc import RpcConnection
from tandem.online.trainer_worker import TrainerParts, TrainerWorker
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.online import OnlineSpec


async def serve(end: socket.socket) -> None:
    """Serve requests until the server process closes its end of the socket."""

    async def handle(what: RpcCall) -> dict[str, Any]:
        return await worker.handle(what)

    def make_parts(spec: OnlineSpec) -> TrainerParts:
        receivers = spec.engine.tensor_parallel if isinstance(spec.engine, VllmEngineSpec) else 1
        return online.parts(spec, EngineProxy(server.call, receivers))

    server = RpcConnection(handle, "server process")
    worker = TrainerWorker(make_parts, server.notify)
    await server.start(end)
    await server.gone.wait()


def main() -> None:
    from tandem.io.leash import die_with

    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process handles Ctrl-C, and then closes the socket
    os.nice(10)  # serving answers goes before training
    asyncio.run(_serve_and_exit(socket.socket(fileno=int(sys.argv[1]))))


async def _serve_and_exit(end: socket.socket) -> None:
    await serve(end)
    os._exit(0)  # do not wait for the training thread: no process is left to commit its version


if __name__ == "__main__":
    main()
