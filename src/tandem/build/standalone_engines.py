"""The composition root of engines by themselves: embedded in this process, a vLLM that it starts, or a
remote one. How a trainer updates them is not known here: build/joined_engines.py connects them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tandem.protocols import Engine
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.model import ModelSpec, PathModel, PresetModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision

if TYPE_CHECKING:
    from tandem.build.training import BuiltModel
    from tandem.engine.vllm.process import VllmOptions, VllmProcess
    from tandem.text.renderer import Renderer


@dataclass(frozen=True)
class Alone:
    """An engine as the one thing that its process does."""

    engine: Any
    renderer: Renderer
    context: int
    num_ids: int
    model: Any = None
    """What the embedded one computes with."""


def renderer(spec: ModelSpec) -> Renderer:
    """Return what turns conversations into ids, without the model and without torch."""
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import byte_tokenizer, light_tokenizer

    tokenizer = byte_tokenizer() if isinstance(spec, PresetModel) else light_tokenizer(spec.path, spec.revision)
    return Renderer(tokenizer, thinking=spec.thinking)


# --- embedded


def embedded(spec: HfEngineSpec, model: BuiltModel, *, inline: bool) -> Engine:
    """In this process, on the trainer's own module."""
    from tandem.engine.hf.engine import EmbeddedEngine
    from tandem.engine.pool import EnginePool

    engines = [
        EmbeddedEngine(
            model.policy.module,
            num_ids=model.num_ids,
            end_ids=model.renderer.end_ids,
            decode=model.renderer.decode,
            max_running=spec.max_running,
            max_context=model.context,
            kv_gib=spec.kv_gib / spec.replicas,
            inline=inline,
        )
        for _ in range(spec.replicas)
    ]
    return engines[0] if spec.replicas == 1 else EnginePool(engines)


def embedded_alone(spec: ServerEngineSpec, path: str, *, device: str, dtype: str, thinking: bool) -> Alone:
    """Forward passes leave the event loop: the server must answer meanwhile."""
    from tandem.build import training

    precision = Float32Precision() if dtype == "float32" else Bfloat16Precision(master="none")  # nothing is trained
    picked = training.pick_device(cast("Any", device))
    model = training.model(PathModel(path=path, thinking=thinking), precision, 0, picked, spec.max_context)
    return embedded_of(spec, model)


def embedded_ahead() -> None:
    """What takes seconds, and depends on no model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from tandem.engine.hf import engine as hf  # noqa: F401
    from tandem.text import renderer, tokenizer  # noqa: F401


def embedded_of(spec: ServerEngineSpec, model: BuiltModel) -> Alone:
    from tandem.engine.hf.engine import EmbeddedEngine

    engine = EmbeddedEngine(
        model.policy.module,
        num_ids=model.num_ids,
        end_ids=model.renderer.end_ids,
        decode=model.renderer.decode,
        max_running=spec.max_running,
        max_context=model.context,
        kv_gib=spec.kv_gib,
        inline=False,
        on_update=spec.on_update,
    )
    return Alone(engine, model.renderer, model.context, model.num_ids, model)


# --- vLLM


def vllm_options(
    spec: VllmEngineSpec,
    *,
    device: str,
    dtype: str,
    adapter_slots: int,
    max_rank: int,
    unchecked: bool = False,
) -> VllmOptions:
    """Of no model yet."""
    from tandem.engine.vllm.process import VllmOptions

    return VllmOptions(
        "",
        spec.python or default_python(),
        dtype=dtype,
        device=device,
        tensor_parallel=spec.tensor_parallel,
        memory_share=spec.memory_share,
        max_running=spec.max_running,
        eager=spec.eager or device == "cpu",
        adapter_slots=adapter_slots,
        max_rank=max_rank,
        sleeps=spec.sleep == "free",
        unchecked=unchecked,
    )


def vllm_ahead(options: VllmOptions, home: Path) -> VllmProcess:
    """Its process, which has yet to be told of a model; and what is imported for it here."""
    from tandem.engine.vllm.process import VllmProcess

    process = VllmProcess(options, home, waits=True)
    from tandem.engine.vllm import engine as vllm  # noqa: F401
    from tandem.text import renderer, tokenizer  # noqa: F401

    return process


def vllm_alone(
    spec: VllmEngineSpec,
    path: str,
    home: Path,
    options: VllmOptions,
    *,
    version: int,
    thinking: bool,
    waiting: VllmProcess | None = None,
    under_way: Callable[[VllmProcess], None] = lambda process: None,
) -> Alone:
    """With its process, once that is ready. `waiting`: one that was started ahead. `under_way` hears of it before."""
    from tandem.engine.vllm.process import VllmProcess

    made_for = _made_for(path)
    context = min(spec.max_context or made_for, made_for)
    options = replace(options, model=path, max_context=context)
    if waiting is not None:
        waiting.serve(options)
    process = waiting or VllmProcess(options, home)  # it takes far longer than what is imported here meanwhile
    under_way(process)
    try:
        from tandem.engine.vllm.engine import VllmEngine
        from tandem.text.renderer import Renderer
        from tandem.text.tokenizer import load_tokenizer

        renderer = Renderer(load_tokenizer(path), thinking=thinking)
    except BaseException:
        process.kill()
        raise
    process.wait_ready(spec.start_deadline_s)
    num_ids = len(renderer.tokenizer)
    engine = VllmEngine(process, end_ids=renderer.end_ids, num_ids=num_ids, on_update=spec.on_update, version=version)
    return Alone(engine, renderer, context, num_ids)


def _made_for(path: str) -> int:
    """Tokens of its longest context. Read from the file where it stands there: transformers take seconds to import."""
    config = Path(path) / "config.json"
    told = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    positions = told.get("max_position_embeddings")
    if isinstance(positions, int) and "text_config" not in told:
        return positions
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings


def default_python() -> str:
    """Where `tandem engine install vllm` puts it."""
    return str(Path.cwd() / ".tandem" / "vllm" / "bin" / "python")


def install_vllm(directory: Path, device: Literal["cpu", "cuda"], version: str, tell: Callable[[str], None]) -> Path:
    from tandem.engine.vllm.install import install

    return install(directory, device, version, tell=tell)


def vllm_version(python: str) -> str:
    from tandem.engine.vllm.tested_versions import version_of

    return version_of(python)


def record_passed(python: str, version: str, checks: list[str]) -> Path:
    """That this vLLM may be used from now on."""
    from tandem.engine.vllm.tested_versions import record

    return record(python, version, checks)


# --- engines that this process does not own


def followed(url: str, token_file: Path, path: str, *, thinking: bool) -> tuple[Alone, str]:
    """Return a client of a running engine and its model name. `path`: for its tokenizer and chat template."""
    from tandem.engine.server.read_only_client import ReadOnlyClient
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import load_tokenizer

    engine = ReadOnlyClient(url, token_file)
    context = int(engine.tell("/limits")["context_tokens"])
    name = str(engine.tell("/v1/models")["data"][0]["id"])
    renderer = Renderer(load_tokenizer(path, field="--model"), thinking=thinking)
    return Alone(engine, renderer, context, len(renderer.tokenizer)), name


def write_preset(preset: str, seed: str, path: str) -> None:
    """A preset as a model directory."""
    from tandem.io import atomic_write
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    module = make_model(preset, tokenizer, int(seed))
    with atomic_write.directory(Path(path)) as directory:
        module.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
