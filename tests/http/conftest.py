from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, browsing
from served import ScriptedEngine, Served, serving, wait_until

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.model.presets import make_model
from tandem.text.grammars import Grammars
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer())


@pytest.fixture(scope="session")
def make_engine(renderer: Renderer) -> Any:
    module = make_model("tiny", renderer.tokenizer, seed=0).eval()

    def make() -> EmbeddedEngine:
        engine = EmbeddedEngine(
            module,
            num_ids=len(renderer.tokenizer),
            end_ids=renderer.end_ids,
            decode=renderer.decode,
            inline=False,
            grammars=Grammars(renderer, len(renderer.tokenizer)),
        )
        engine.version = 7
        return engine

    return make


@pytest.fixture(scope="session")
def served(make_engine: Any, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded engine on a random model: it says anything, invalid UTF-8 included, and the same for every seed."""
    with serving(make_engine(), renderer, tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="session")
def _scripted(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(ScriptedEngine(renderer), renderer, tmp_path_factory.mktemp("scripted"), max_requests=80) as served:
        yield served


@pytest.fixture
def scripted(_scripted: Served) -> Iterator[Served]:
    fresh = ScriptedEngine(_scripted.renderer)
    yield _scripted
    wait_until(lambda: _scripted.engine.running == 0)
    vars(_scripted.engine).update(vars(fresh))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
