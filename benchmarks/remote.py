"""What streams of somebody else's server cost a run that reads them, in CPU a token: `python benchmarks/remote.py`.

STREAMS requests at a time to one server of this machine, in a process of its own, which sends events as vLLM does and
computes nothing. Beside it the same events from memory, only decoded: what no client can do without.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

from common import note, table
from tandem.engine.remote.engine import RemoteEngine
from tandem.io.engine_messages import decoded, encoded
from tandem.types import Sampling

TOKENS, TIMES, PAUSE_S = 64, 5, 0.002
STREAMS, AT_ONCE = (8, 64, 400), (1, 16)
JSON, EVENTS = "application/json", "text/event-stream\r\nTransfer-Encoding: chunked"


def events(at_once: int) -> list[bytes]:
    told: list[bytes] = []
    for begin in range(0, TOKENS, at_once):
        ids = [100 + begin + place for place in range(at_once)]
        logprobs = {"token_logprobs": [-1.2345678] * at_once, "tokens": [" word"] * at_once, "text_offset": ids}
        end = "length" if begin + at_once == TOKENS else None
        choice = {"index": 0, "text": " word" * at_once, "logprobs": logprobs, "finish_reason": end, "token_ids": ids}
        told.append(encoded({"id": "cmpl-" + "0" * 32, "created": 0, "model": "m", "choices": [choice], "usage": None}))
    return told


async def serve(at_once: int) -> None:
    stream = [b"data: %s\n\n" % each for each in [*events(at_once), b"[DONE]"]]
    models = encoded({"data": [{"id": "m", "owned_by": "vllm"}]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            is_stream = head.startswith(b"POST")
            kind = EVENTS if is_stream else f"{JSON}\r\nContent-Length: {len(models)}"
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode())
            for each in stream if is_stream else ():
                writer.write(b"%x\r\n%s\r\n" % (len(each), each))
                await asyncio.sleep(PAUSE_S)
            writer.write(b"0\r\n\r\n" if is_stream else models)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Of the next request, with its body taken; nothing if there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    return head


async def microseconds(engine: RemoteEngine, streams: int) -> float:
    sampling = Sampling(max_tokens=TOKENS)
    rounds: list[float] = []
    for _ in range(TIMES + 1):  # the first one connects
        began = time.process_time()
        done = await asyncio.gather(*(engine.generate([1, 2, 3], sampling) for _ in range(streams)))
        rounds.append((time.process_time() - began) / sum(len(each.ids) for each in done) * 1e6)
    return statistics.median(rounds[1:])


def only_decoded(at_once: int) -> float:
    told, began = events(at_once), time.process_time()
    for _ in range(500):
        for each in told:
            decoded(each)
    return (time.process_time() - began) / (500 * TOKENS) * 1e6


async def measure(at_once: int) -> list[list[str]]:
    with subprocess.Popen([sys.executable, __file__, "serve", str(at_once)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        engine = RemoteEngine(f"http://127.0.0.1:{int(server.stdout.readline())}/v1", "m")
        try:
            found = {streams: await microseconds(engine, streams) for streams in STREAMS}
        finally:
            await engine.close()
            server.terminate()
    floor = only_decoded(at_once)
    return [
        [f"{streams}", f"{at_once}", f"{spent:.0f}", f"{1e6 / spent:,.0f}", f"{floor:.1f}"]
        for streams, spent in found.items()
    ]


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return asyncio.run(serve(int(sys.argv[2])))
    note(f"{TOKENS} tokens a stream, medians of {TIMES} rounds after one")
    rows = [row for at_once in AT_ONCE for row in asyncio.run(measure(at_once))]
    table(["streams", "tokens an event", "us of CPU a token", "tokens/s of a core", "us to decode alone"], rows)


if __name__ == "__main__":
    main()
