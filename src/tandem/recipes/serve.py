"""Serve the model of a run, or any model, over HTTP or in the terminal; serve an engine for a trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from tandem.build import built_model, run_engines, served_adapters, standalone_engines
from tandem.build.this_machine import vllm_installed
from tandem.errors import EngineLost, RunError, SpecError, TandemError
from tandem.io import prestart
from tandem.io.chat_feedback import ChatStore
from tandem.io.gguf.directory import model_directory
from tandem.io.model_path_check import refuse_no_model
from tandem.io.sqlite_store import owned
from tandem.obs.live_view import busy
from tandem.obs.run_history import read_status
from tandem.protocols import Engine
from tandem.recipes.adapter_table import AdapterTable, find_step
from tandem.recipes.online_export import find_learned, merged_copy
from tandem.serve.http.run import Listen, serve_forever
from tandem.serve.terminal_chat import chat_loop
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.load import load_spec, parse_overrides, parse_own_engine
from tandem.spec.model import PathModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.types import Sampling

_SLOTS = 32  # of vLLM, for the adapters that a file may name


def serve_model(
    source: str | Path, listen: Listen, spec: HfEngineSpec | VllmEngineSpec | None = None, *, thinking: bool = False,
    feedback: bool = False, step: int | None = None, name: str = "", adapters: Sequence[str] = (),
    adapters_file: str | Path | None = None, adapter_slots: int = 0, max_rank: int = 0,
) -> None:  # fmt: skip
    """Serve a model over OpenAI's API until SIGTERM or Ctrl-C. `spec`: of the engine; None chooses one, and says which.
    `feedback`: keep each chat in the data directory, and take thumbs for its id. `step`: the checkpoint of a run to
    serve; its files are checked by its seal before and after they are loaded. `name`: to serve it under; default: the
    directory's. `adapters`: further models of the same base, as NAME=DIR, NAME=RUN or NAME=RUN@STEP. `adapters_file`:
    names more of them, and is read again when it changes. vLLM must know how many adapters it may have
    (`adapter_slots`; 0: those named, and 32 with a file) and their highest rank (`max_rank`; 0: that of the adapters
    named, and at least 16). Weights are bfloat16 on a GPU and float32 on a CPU."""
    from tandem.serve.http.service import create_app
    from tandem.serve.openai.service import openai_service

    path, found_name, version = find_model(source) if step is None else find_step(Path(source), step)
    spec = spec or engine_here(source)
    if isinstance(spec, VllmEngineSpec):
        spec = _as_the_run_has_it(spec, Path(source))
    own = served_adapters.is_adapter(Path(path))
    served = AdapterTable([f"{name or found_name}={source}@{step}"] if own else [], adapters, adapters_file)
    token = listen.token()  # before the model is loaded, so that a wrong data directory is reported at once
    chats = ChatStore(listen.data_dir) if feedback else None
    if isinstance(spec, VllmEngineSpec):
        slots = adapter_slots or len(adapters) + own + (_SLOTS if adapters_file else 0)
        base = served_adapters.base_directory(Path(source), listen.data_dir / "base") if own else path
        rank = max_rank or max(16, served.highest_rank())
        model = _vllm_of(base, version, spec, listen.data_dir, thinking=thinking, slots=slots, max_rank=rank)
        engine = model.engine
    else:
        # inline=False: the model computes off the event loop, so that HTTP can answer meanwhile.
        base = Path(source) if own else path
        model, engine = load_model(base, version, spec, thinking=thinking, inline=False)
    if step is not None:
        find_step(Path(source), step)
    failed, watch = list[TandemError](), list[asyncio.Task[None]]()
    if not isinstance(spec, VllmEngineSpec):
        asyncio.run(served.begin(engine))

    async def end_with_vllm() -> None:
        await engine.lost()
        failed.append(EngineLost("engine: vLLM has ended, and `tandem serve` with it; start it again"))
        os.kill(os.getpid(), signal.SIGTERM)

    async def start() -> None:
        try:
            if isinstance(spec, VllmEngineSpec):  # its connections belong to the server's event loop
                watch.append(asyncio.create_task(end_with_vllm(), name="vLLM watch"))
                await served.begin(engine)
            await served.follow()
        except TandemError as error:
            failed.append(error)
            for each in watch:
                each.cancel()
            await engine.close()
            raise

    service = openai_service(
        engine, model.renderer, model_id=f"base of {found_name}" if own else name or found_name,
        context=model.context, num_ids=model.num_ids, chats=chats, adapters=served.models, start=start,
    )  # fmt: skip

    async def close() -> None:
        for each in watch:  # vLLM is ended in order now
            each.cancel()
        assert service.close is not None
        await service.close()

    serve_forever(create_app(replace(service, close=close), token=token, hosts=listen.hosts), listen)
    if failed:
        raise failed[0]


def engine_here(source: str | Path, options: Sequence[str] = ()) -> HfEngineSpec | VllmEngineSpec:
    """Return the engine that serves where none is named, and say which, and why: vLLM on a GPU where it is installed.
    `options`: of its table, as KEY=VALUE."""
    keys = parse_overrides(options).keys()
    of_hf, of_vllm = (sorted(keys - other.model_fields.keys()) for other in (VllmEngineSpec, HfEngineSpec))
    why_not = (
        f"vLLM does not have the setting {of_hf[0]}" if of_hf
        else "" if of_vllm
        else "there is no GPU" if built_model.pick_device("auto").type == "cpu"
        else "vLLM is not installed; `tandem engine install vllm` does that"
        if not vllm_installed(_as_the_run_has_it(VllmEngineSpec(), Path(source)).python)
        else ""
    )  # fmt: skip
    why = f"only vLLM has the setting {of_vllm[0]}" if of_vllm else "it is installed"
    told = (
        f"the embedded engine serves: {why_not}" if why_not else f"vLLM serves: {why} (--engine hf: the embedded one)"
    )
    spec = parse_own_engine("hf" if why_not else "vllm", options)  # refuses a wrong setting before anything is said
    print(told, file=sys.stderr, flush=True)
    return spec


def _as_the_run_has_it(spec: VllmEngineSpec, source: Path) -> VllmEngineSpec:
    """Return the options with the interpreter of a run's own vLLM, unless they name one."""
    if spec.python or not (source / "spec.toml").is_file():
        return spec
    own = getattr(load_spec(source / "spec.toml"), "engine", None)
    return spec.model_copy(update={"python": own.python}) if isinstance(own, VllmEngineSpec) else spec


def _vllm_of(
    path: str, version: int, spec: VllmEngineSpec, home: Path, *, thinking: bool, slots: int, max_rank: int
) -> standalone_engines.Alone:
    """Start vLLM for a model, and return its engine."""
    if spec.url or spec.replicas > 1:
        raise SpecError("engine: `tandem serve` starts one vLLM: set neither engine.url nor engine.replicas")
    device = built_model.pick_device("auto").type
    dtype = "float32" if device == "cpu" else "bfloat16"
    options = standalone_engines.vllm_options(
        spec, device=device, dtype=dtype, adapter_slots=slots, max_rank=max_rank
    )  # fmt: skip
    with busy(f"starting vLLM with {path}"):
        return standalone_engines.vllm_alone(spec, path, home, options, version=version, thinking=thinking)


def serve_engine(
    source: str | Path,
    listen: Listen,
    spec: ServerEngineSpec | VllmEngineSpec | None = None,
    *,
    version: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    thinking: bool = False,
    adapter_slots: int = 0,
    max_rank: int = 16,
    unchecked: bool = False,
    allow_hosts: Sequence[str] = (),
    allow_directories: Sequence[str | Path] = (),
    images: str | Path | None = None,
) -> None:
    """Serve an engine for a trainer in another process, until SIGTERM or Ctrl-C.

    It answers with the weights on disk, as `version`, until a trainer attaches and loads another. vLLM must know
    how many adapter versions may be in use at one time (`adapter_slots`) and their highest rank. `unchecked` accepts a
    vLLM version that has not passed the conformance suite. StoreOwned if another process holds the data directory.

    With a `source` of "@FILE" the process starts ahead of time: it imports everything, and loads nothing until FILE
    exists, which holds {"model": DIRECTORY, "version": N}. `images`: with vLLM, where a run keeps the images that
    requests name.
    """
    from tandem.serve.engine.link_rules import Allowed
    from tandem.serve.engine.service import engine_service
    from tandem.serve.http.service import create_app
    from tandem.vllm_worker import weight_sources

    spec, device = spec or ServerEngineSpec(), built_model.pick_device(device).type
    options = waiting = None
    if isinstance(spec, VllmEngineSpec):
        options = standalone_engines.vllm_options(
            spec, device=device, dtype=dtype, adapter_slots=adapter_slots, max_rank=max_rank, unchecked=unchecked
        )
    if (source := str(source)).startswith("@"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # exits in order, which ends vLLM's process too
        if options is None:
            standalone_engines.embedded_ahead()
        else:
            waiting = standalone_engines.vllm_ahead(options, listen.data_dir)
        print(f"engine: ready to load the model that {source[1:]} will name", file=sys.stderr, flush=True)
        order = prestart.told(Path(source[1:]))
        source, version = order["model"], order["version"]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    path, name, found_version = find_model(source)
    version = found_version if version is None else version
    token = listen.token()
    with owned(listen.data_dir):
        if isinstance(spec, VllmEngineSpec):
            assert options is not None
            standalone = standalone_engines.vllm_alone(
                spec, path, listen.data_dir, options, version=version, thinking=thinking,
                images=None if images is None else Path(images), waiting=waiting,
            )  # fmt: skip
        else:
            standalone = standalone_engines.embedded_alone(spec, path, device=device, dtype=dtype, thinking=thinking)
            _publish(standalone.model, standalone.engine, version)
        open_source = weight_sources.open_source
        if (model := standalone.model) is not None and model.device.type == "cuda":
            # Files are read straight to the GPU, which digests them. To map 269 MB and digest them on the CPU took 8 s
            # beside two ranks, on 32 cores.
            open_source = partial(open_source, device=model.device)
        service = engine_service(
            standalone.engine,
            open_source,
            renderer=standalone.renderer,
            model_id=name,
            context=standalone.context,
            num_ids=standalone.num_ids,
            allowed=Allowed(hosts=frozenset(allow_hosts), directories=tuple(map(Path, allow_directories))),
        )
        serve_forever(create_app(service, token=token, hosts=listen.hosts), listen)


def chat_with(
    source: str | Path, *, temperature: float = 0.0, max_tokens: int = 512, system: str = "", thinking: bool = False
) -> None:
    """Talk to a model in the terminal, until /exit."""
    path, _, version = find_model(source)
    model, engine = load_model(path, version, HfEngineSpec(), thinking=thinking, inline=True)

    async def talk() -> None:
        sampling = Sampling(max_tokens=min(max_tokens, model.context // 2), temperature=temperature)
        try:
            await chat_loop(engine, model.renderer, context=model.context, sampling=sampling, system=system)
        finally:
            await engine.close()

    asyncio.run(talk())


def default_data_dir(source: str | Path) -> Path:
    """Return serve/ in a run, and .tandem/serve for any other model."""
    return Path(source) / "serve" if (Path(source) / "status.json").exists() else Path(".tandem") / "serve"


def find_model(source: str | Path, *, field: str = "model", weights: bool = True) -> tuple[str, str, int]:
    """Return a model's path or hub id, the name to serve it under, and the version of its weights. `field`: the name of
    the caller's option, for errors. `weights=False`: a tokenizer without weights is enough."""
    path = Path(source)
    if (learned := find_learned(path)) is not None:
        return str(merged_copy(learned)), learned.spec().name, learned.version
    if not os.path.exists(path / "status.json"):
        refuse_no_model(str(source), field=field, weights=weights)
        return model_directory(str(source), field), path.name or str(source), 0
    export = path / "export"
    if not export.exists():
        raise RunError(f"{path}: has no export/, because the run did not succeed; see {path / 'status.json'}")
    return str(export), path.name, int(read_status(path).get("steps_done", 0))


def load_model(
    path: str | Path, version: int, spec: HfEngineSpec, *, thinking: bool, inline: bool
) -> tuple[built_model.BuiltModel, Engine]:
    """Load a model and the embedded engine that serves it as `version`. A Path is the run whose adapter's base is
    loaded."""
    with busy(f"loading {path}"):
        device = built_model.pick_device("auto")
        precision = Float32Precision() if device.type == "cpu" else Bfloat16Precision(master="none")
        if isinstance(path, Path):
            model = served_adapters.base_of_run(path, precision, device, spec.max_context)
        else:
            asked = PathModel(path=path, thinking=thinking)
            model = built_model.model(asked, precision, 0, device, spec.max_context)
        engine = standalone_engines.embedded(spec, model, inline=inline)
        _publish(model, engine, version)
    return model, engine


def _publish(model: built_model.BuiltModel, engine: Engine, version: int) -> None:
    """Make the embedded engine serve the model's weights as `version`."""
    bridge = run_engines.inproc_bridge()

    async def publish() -> None:
        await engine.attach(bridge.source(engine.receivers))
        bridge.send(model.policy.weights(version, "live"))
        await engine.load(version)

    asyncio.run(publish())
