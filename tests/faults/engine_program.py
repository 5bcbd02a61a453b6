"""An engine's server without a model, for being killed: it starts in a second. `engine_program.py VERSION READY DATA`.

It counts from 1 with 10 ms a token, and takes every version that it is told to load. A file DATA/torn says that
somebody wrote into its memory.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.protocols import OnToken
from tandem.types import Completion, Sampling, Served, Span


class Counting:
    receivers, stays, why_torn = 1, False, ""

    def __init__(self, version: int, torn: Path) -> None:
        self.torn = torn
        self.version, self.cache_epoch, self.lent_bytes, self.boot_id = version, 0, 0, uuid.uuid4().hex

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: Any = None, on_token: OnToken | None = None
    ) -> Completion:
        ids = list(range(1, sampling.max_tokens + 1))
        for token_id in ids:
            await asyncio.sleep(0.01)
            if on_token is not None:
                on_token(token_id, -1.0, self.version)
        return Completion(ids, [-1.0] * len(ids), [Span(self.version, len(ids))], "length")

    async def attach(self, source: Any) -> None:
        source.attached({"boot_id": self.boot_id, "workers": 1, "layout": {}})

    async def load(self, version: int) -> Served:
        self.version, self.cache_epoch = version, self.cache_epoch + 1
        return Served(version, await self.fingerprints(), (self.boot_id,), self.cache_epoch)

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def fingerprints(self) -> Mapping[str, str]:
        return {"w": f"{self.version:016x}"}

    async def remember(self) -> None:
        pass

    async def intact(self) -> bool:
        return not self.torn.exists()

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class End:
    carries = "full"

    def __init__(self, link: Mapping[str, Any]) -> None:
        self.link, self.reply = link, dict[str, Any]()

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.reply = dict(reply)

    def close(self) -> None:
        pass


class Wordless:
    """A renderer that is never asked: no test sends text."""

    def within(self, context: int) -> Wordless:
        return self


def main(version: int, ready_file: Path, data_dir: Path) -> None:
    from tandem.serve.engine.link_rules import Allowed
    from tandem.serve.engine.service import engine_service
    from tandem.serve.http.run import Listen, serve_forever
    from tandem.serve.http.service import create_app

    listen = Listen(data_dir, ready_file=ready_file)
    wordless: Any = Wordless()
    service = engine_service(
        Counting(version, data_dir / "torn"), End, renderer=wordless, model_id="counting", context=10**6,
        num_ids=1000, allowed=Allowed(directories=(data_dir,)),
    )  # fmt: skip
    serve_forever(create_app(service, token=listen.token(), hosts=listen.hosts), listen)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
