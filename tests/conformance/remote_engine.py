"""An embedded engine behind OpenAI's routes, on a thread of this process, and the engine that asks it there."""

from __future__ import annotations

import asyncio
from typing import Any

from server_engine import ThreadServer

from tandem.engine.remote.engine import RemoteEngine


class ThreadRemoteEngine(RemoteEngine):
    """Closing it ends its server."""

    def __init__(self, engine: Any, *, num_ids: int) -> None:
        engine.version = max(engine.version, 0)  # what it has is good enough to be asked for
        self.server = ThreadServer(engine, num_ids=num_ids)
        key_file = str(self.server.listen.token_file)
        super().__init__(f"{self.server.url}/v1", "test/tiny", key_file=key_file, deadline_s=10.0)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.stop)
