"""Chat in the terminal. Each turn follows the sampled token ids of the last, so nothing is tokenised again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from tandem.protocols import Engine
from tandem.serve.openai.text_stream import TextStream
from tandem.types import Completion, Message, Sampling

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer.\n"


class TurnRenderer(Protocol):
    @property
    def end_ids(self) -> frozenset[int]: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def glue(self, messages: Sequence[Message], last_id: int) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


def _print(text: str) -> None:
    print(text, end="", flush=True)


async def chat_loop(
    engine: Engine,
    renderer: TurnRenderer,
    *,
    context: int,
    sampling: Sampling | None = None,
    system: str = "",
    ask: Callable[[str], str] = input,
    tell: Callable[[str], None] = _print,
) -> None:
    """Chat until /exit, the end of the input, or Ctrl-C at the prompt."""
    sampling = sampling or Sampling(max_tokens=512, temperature=0.7)
    ids: list[int] = []
    tell(HELP)
    while True:
        try:
            with _plain_ctrl_c():
                said = ask("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            tell("\n")
            return
        match said:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                ids = []
                tell("(forgotten)\n")
                continue
            case _ if said.startswith("/"):
                tell(HELP)
                continue
            case _:
                pass
        prompt = _next_prompt(renderer, ids, said, system)
        room = context - len(prompt)
        if room < 1:
            tell(f"({len(prompt)} tokens do not fit into a context of {context}; use /reset, or write less)\n")
            continue
        asked = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=sampling.seed + len(prompt))
        completion = await _reply(engine, renderer, prompt, asked, tell)
        # A stopped turn is removed from the conversation.
        ids = prompt + completion.ids if completion else ids


def _next_prompt(renderer: TurnRenderer, ids: list[int], said: str, system: str) -> list[int]:
    user = {"role": "user", "content": said}
    if ids:
        return ids + renderer.glue([user], ids[-1])
    return renderer.prompt([{"role": "system", "content": system}, user] if system else [user])


async def _reply(
    engine: Engine, renderer: TurnRenderer, prompt: list[int], sampling: Sampling, tell: Callable[[str], None]
) -> Completion | None:
    stream = TextStream(renderer.decode, sampling.stop)

    def on_token(token_id: int, _logprob: float, _version: int) -> None:
        if token_id not in renderer.end_ids:
            tell(stream.push([token_id]))

    task = asyncio.create_task(engine.generate(prompt, sampling, on_token=on_token))
    try:
        with _ctrl_c_cancels(task):
            await asyncio.wait((task,))
    finally:
        task.cancel()
    tell(stream.close())
    if task.cancelled():
        tell("\n(stopped; this turn is forgotten)\n")
        return None
    completion = task.result()
    tell("\n" if completion.finish_reason == "stop" else f"\n(cut at {len(completion.ids)} tokens)\n")
    return completion


@contextlib.contextmanager
def _plain_ctrl_c() -> Iterator[None]:
    """Restore the usual Ctrl-C: asyncio turns it into a cancellation, which a blocking `input` would not notice."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ctrl_c_cancels(task: asyncio.Task[Completion]) -> Iterator[None]:
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (ValueError, RuntimeError):  # not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
