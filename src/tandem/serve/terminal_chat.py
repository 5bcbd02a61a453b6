"""Chat in the terminal. Each turn follows the sampled token ids of the last, so nothing is tokenised again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tandem.errors import ImageError
from tandem.obs.claims import printable
from tandem.protocols import Engine
from tandem.serve.openai.text_stream import TextStream
from tandem.types import Completion, Message, Sampling

STOPPED = "\n(stopped; this turn is forgotten)\n"
HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer.\n"


class TurnRenderer(Protocol):
    @property
    def end_ids(self) -> frozenset[int]: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def glue(self, messages: Sequence[Message], last_id: int) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


def _print(text: str) -> None:
    print(printable(text), end="", flush=True)


class TalkPartner(Protocol):
    """What is talked to, and what was said."""

    def forget(self) -> None: ...
    async def reply(self, said: str, tell: Callable[[str], None]) -> None:
        """Tell the answer as it comes. Ctrl-C stops it; that turn is then forgotten."""
        ...


async def converse(
    conversation: TalkPartner, ask: Callable[[str], str] = input, tell: Callable[[str], None] = _print
) -> None:
    """Talk until /exit, the end of the input, or Ctrl-C at the prompt."""
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
                conversation.forget()
                tell("(forgotten)\n")
            case _ if said.startswith("/"):
                tell(HELP)
            case _:
                await conversation.reply(said, tell)


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
    """Chat with an engine."""
    sampling = sampling or Sampling(max_tokens=512, temperature=0.7)
    await converse(_EngineConversation(engine, renderer, context, sampling, system), ask, tell)


@dataclass
class _EngineConversation:
    engine: Engine
    renderer: TurnRenderer
    context: int
    sampling: Sampling
    system: str
    ids: list[int] = field(default_factory=list[int])

    def forget(self) -> None:
        self.ids = []

    async def reply(self, said: str, tell: Callable[[str], None]) -> None:
        try:
            prompt = _next_prompt(self.renderer, self.ids, said, self.system)
        except ImageError as error:
            tell(f"({error})\n")
            return
        room = self.context - len(prompt)
        if room < 1:
            tell(f"({len(prompt)} tokens do not fit into a context of {self.context}; use /reset, or write less)\n")
            return
        sampling = self.sampling
        asked = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=sampling.seed + len(prompt))
        completion = await _reply(self.engine, self.renderer, prompt, asked, tell)
        # A stopped turn is removed from the conversation.
        self.ids = prompt + completion.ids if completion else self.ids


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
        with ctrl_c_cancels(task):
            await asyncio.wait((task,))
    finally:
        task.cancel()
    tell(stream.close())
    if task.cancelled():
        tell(STOPPED)
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
def ctrl_c_cancels(task: asyncio.Task[Any]) -> Iterator[None]:
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
