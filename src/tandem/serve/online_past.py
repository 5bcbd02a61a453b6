"""Versions that were published before, asked beside the one that serves: `/versions/{version}/v1/...`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from tandem.errors import CheckpointError, NotKnown
from tandem.serve.app import Refused
from tandem.serve.openai import Sampler

_AT_A_TIME = 2  # each holds a whole copy of the weights


class Past:
    def __init__(self, load: Callable[[int], Sampler] | None) -> None:
        """`load` makes an engine of a version; it may block. None: this server's engine has one version at a time."""
        self._load, self._turn = load, asyncio.Lock()
        self._engines: OrderedDict[int, Sampler] = OrderedDict()

    async def engine(self, version: int) -> Sampler:
        """The one that was asked least recently goes for it, and with it what it was answering."""
        if self._load is None:
            text = "only the embedded engine with all weights trained holds several versions; activate the version"
            raise Refused(409, text, field="version")
        async with self._turn:
            if version not in self._engines:
                while len(self._engines) >= _AT_A_TIME:
                    _, oldest = self._engines.popitem(last=False)
                    await oldest.close()
                try:
                    self._engines[version] = await asyncio.to_thread(self._load, version)
                except CheckpointError as error:
                    raise NotKnown(f"version {version} cannot be read: {error}") from error
            self._engines.move_to_end(version)
            return self._engines[version]

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
