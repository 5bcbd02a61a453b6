"""Build engines without a trainer: embedded in this process, a vLLM process, or a client of a running engine.

Engines of a training run, with their bridges, are built in run_engines.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tandem.io.gguf.directory import model_directory
from tandem.protocols import Engine
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.model import ModelSpec, PathModel, PresetModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision

if TYPE_CHECKING:
    from tandem.build.built_model import BuiltModel
    from tandem.engine.hf.engine import EmbeddedEngine
    from tandem.engine.vllm.options import VllmOptions
    from tandem.engine.vllm.process import VllmProcess
    from tandem.text.renderer import Renderer


@dataclass(frozen=True)
class Alone:
    """An engine with its renderer and limits, for a process that only serves."""

    engine: Any
    renderer: Renderer
    context: int
    num_ids: int
    model: Any = None
    """The model of the embedded engine; None for other engines."""


def renderer(spec: ModelSpec) -> Renderer:
    """Return the renderer of conversations to token ids, without loading the model or torch."""
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import byte_tokenizer, light_tokenizer

    tokenizer = byte_tokenizer() if isinstance(spec, PresetModel) else light_tokenizer(spec.path, spec.revision)
    return Renderer(tokenizer, thinking=spec.thinking)


# --- embedded


def embedded(spec: HfEngineSpec, model: BuiltModel, *, inline: bool) -> Engine:
    """Build the embedded engine, in this process and on the trainer's module."""
    from tandem.engine.pool import EnginePool

    make = _embedded(model, spec, kv_gib=spec.kv_gib / spec.replicas, inline=inline)
    engines = [make() for _ in range(spec.replicas)]
    return engines[0] if spec.replicas == 1 else EnginePool(engines)


def _embedded(model: BuiltModel, spec: HfEngineSpec | ServerEngineSpec, **options: Any) -> Callable[[], EmbeddedEngine]:
    """Return how to build embedded engines of one model. They share its compiled grammars."""
    from tandem.engine.hf.engine import EmbeddedEngine
    from tandem.text.grammars import Grammars

    eager = model.device.type == "cpu" if spec.eager == "auto" else spec.eager
    return partial(
        EmbeddedEngine, model.policy.module, vision=model.policy.vision, num_ids=model.num_ids,
        end_ids=model.renderer.end_ids,
        decode=model.renderer.decode, grammars=Grammars(model.renderer, model.num_ids), max_context=model.context,
        max_running=spec.max_running, eager=eager, **options,
    )  # fmt: skip


def embedded_alone(spec: ServerEngineSpec, path: str, *, device: str, dtype: str, thinking: bool) -> Alone:
    """Load a model and build the embedded engine that serves it. It computes off the event loop, so HTTP can answer."""
    from tandem.build import built_model

    precision = Float32Precision() if dtype == "float32" else Bfloat16Precision(master="none")  # nothing is trained
    torch_device = built_model.pick_device(cast("Any", device))
    model = built_model.model(PathModel(path=path, thinking=thinking), precision, 0, torch_device, spec.max_context)
    return embedded_of(spec, model)


def embedded_ahead() -> None:
    """Import the modules of the embedded engine ahead of time; this takes seconds and needs no model yet."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from tandem.engine.hf import engine as hf  # noqa: F401
    from tandem.text import renderer, tokenizer  # noqa: F401


def embedded_of(spec: ServerEngineSpec, model: BuiltModel) -> Alone:
    """Build the embedded engine of a loaded model."""
    make = _embedded(model, spec, kv_gib=spec.kv_gib, inline=False, on_update=spec.on_update)
    return Alone(make(), model.renderer, model.context, model.num_ids, model)


# --- vLLM


def vllm_options(
    spec: VllmEngineSpec, *, device: str, dtype: str, adapter_slots: int, max_rank: int, unchecked: bool = False
) -> VllmOptions:
    """Return the options of a vLLM process, without the model."""
    from tandem.engine.vllm.options import VllmOptions

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
        further=spec.arguments,
    )


def vllm_ahead(options: VllmOptions, home: Path) -> VllmProcess:
    """Start a vLLM process ahead of time, which waits for a model; import here what it needs meanwhile."""
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
    images: Path | None = None,
    waiting: VllmProcess | None = None,
    under_way: Callable[[VllmProcess], None] = lambda process: None,
) -> Alone:
    """Start vLLM and return its engine once it is ready. `images`: a directory of them, for a model that sees.
    `waiting`: a process of `vllm_ahead`. `under_way` is called with the process before it is ready, so that the caller
    can end it."""
    from tandem.engine.vllm.process import VllmProcess

    path = model_directory(path, "model")
    model_context = _model_context(path)
    context = min(spec.max_context or model_context, model_context)
    options = replace(options, model=path, max_context=context)
    process = waiting or VllmProcess(options, home)  # first, because it starts while this process imports
    under_way(process)
    try:
        if waiting is not None:
            waiting.serve(options)
        from tandem.engine.vllm.engine import VllmEngine
        from tandem.io.image_store import ImageStore
        from tandem.text.model_images import ModelImages
        from tandem.text.renderer import Renderer
        from tandem.text.tokenizer import load_tokenizer

        renderer = Renderer(load_tokenizer(path), thinking=thinking)
        source = ModelImages(path, ImageStore(images)) if images is not None and options.sees else None
    except BaseException:
        process.kill()
        raise
    process.wait_ready(spec.start_deadline_s)
    num_ids = len(renderer.tokenizer)
    engine = VllmEngine(
        process, end_ids=renderer.end_ids, num_ids=num_ids, on_update=spec.on_update, version=version, images=source
    )
    return Alone(engine, renderer, context, num_ids)


def _model_context(path: str) -> int:
    """Return the model's longest context in tokens; from config.json if possible, as transformers imports slowly."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and "text_config" not in config:
        return positions
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings


def default_python() -> str:
    """Return the interpreter that `tandem engine install vllm` creates by default."""
    return str(Path.cwd() / ".tandem" / "vllm" / "bin" / "python")


def install_vllm(directory: Path, device: Literal["cpu", "cuda"], version: str, tell: Callable[[str], None]) -> Path:
    """Create an environment with vLLM and return its interpreter."""
    from tandem.engine.vllm.install import install

    return install(directory, device, version, tell=tell)


def vllm_version(python: str) -> str:
    """Return the version of vLLM that an interpreter has."""
    from tandem.engine.vllm.tested_versions import version_of

    return version_of(python)


def record_passed(python: str, version: str, checks: list[str]) -> Path:
    """Record that this vLLM version passed the conformance suite, so that runs accept it; return the file."""
    from tandem.engine.vllm.tested_versions import record

    return record(python, version, checks)


# --- a running engine


def followed(url: str, token_file: Path, path: str, *, thinking: bool) -> tuple[Alone, str]:
    """Return a read-only client of a running engine, and its model's name. `path`: the tokenizer's directory or id."""
    from tandem.engine.server.read_only_client import ReadOnlyClient
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import load_tokenizer

    engine = ReadOnlyClient(url, token_file)
    context = int(engine.tell("/limits")["context_tokens"])
    name = str(engine.tell("/v1/models")["data"][0]["id"])
    renderer = Renderer(load_tokenizer(path, field="--model"), thinking=thinking)
    return Alone(engine, renderer, context, len(renderer.tokenizer)), name


def write_preset(preset: str, seed: str, path: str) -> None:
    """Write a preset model, with random weights, as a model directory."""
    from tandem.io import atomic_write
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    module = make_model(preset, tokenizer, int(seed))
    with atomic_write.directory(Path(path)) as directory:
        module.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
