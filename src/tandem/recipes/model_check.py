"""`tandem model check`: say what a model is, what it can be used for here, and whether trainer and engine agree on it.

The model is loaded as a run would load it. Its answer to one question is decoded greedily by the embedded engine, and
the trainer scores the same tokens. What stands in the way of a run is a finding.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.build import built_model, run_engines, standalone_engines, training
from tandem.errors import SpecError, TandemError
from tandem.io.bounded_json import read_json
from tandem.io.gguf.source import gguf_of
from tandem.io.model_path_check import refuse_missing
from tandem.recipes import plan_run as plans
from tandem.runs.first_spec import FirstAnswers, Way, gpu_gib, gpus, spec_for
from tandem.runs.planner.calibration import card_named
from tandem.runs.planner.plan import kind_of
from tandem.spec.bridges import BRIDGES
from tandem.spec.engine import HfEngineSpec
from tandem.spec.load import parse_spec
from tandem.spec.model import PathModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.spec.run import RunSpec, SftSpec
from tandem.types import Sampling, Trajectory

if TYPE_CHECKING:
    from tandem.build.built_model import BuiltModel

QUESTION = "What is the capital of France?"
_TOKENS, _ROW_TOKENS = 24, 1024
_MOST_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference of trainer's and engine's logprobs, in nats a token."""


@dataclass(slots=True)
class ModelCheck:
    """What `check_model` found out. The facts are empty where a finding stood in the way."""

    source: str
    findings: list[str] = field(default_factory=list[str])
    """What stands in the way of a run."""
    mended: list[str] = field(default_factory=list[str])
    """What Tandem changes in the special tokens."""
    notes: list[str] = field(default_factory=list[str])
    """What else to know; nothing of it stands in the way."""
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    fits: dict[str, str] = field(default_factory=dict[str, str])
    """What the model can be used for: "yes", or why not."""
    memory: dict[str, str] = field(default_factory=dict[str, str])
    answer: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def passed(self) -> bool:
        return not self.findings

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [self.source]
        for name in ("model", "template", "fits", "memory", "answer"):
            facts: dict[str, Any] = getattr(self, name)
            width = max(map(len, facts), default=0)
            lines += (
                ["", name, *(f"  {key:<{width}}  {_shown(value)}" for key, value in facts.items())] if facts else []
            )
        for name in ("mended", "notes", "findings"):
            told: list[str] = getattr(self, name)
            lines += ["", name, *(f"  {each}" for each in told)] if told else []
        count = len(self.findings)
        return "\n".join([*lines, "", f"{count or 'no'} finding{'s' * (count != 1)}"])


def check_model(
    source: str | Path, *, dtype: Literal["float32", "bfloat16"] = "float32", gpu: str = "", revision: str = "main"
) -> ModelCheck:
    """Check a model: a directory, a GGUF file, a hub id, or the directory of an adapter. `gpu`: the machine to plan
    memory for, as in `tandem init`; left out, this one. SpecError for an unknown `gpu`."""
    gpu = "none" if gpu == "cpu" else card_named(gpu) or gpu  # names of `tandem plan`
    if gpu:
        gpu_gib(gpu)  # refuses an unknown one
    check = ModelCheck(str(source))
    device = built_model.pick_device("auto")
    with _kept_warnings() as kept:
        _look(check, dtype, gpu, revision, device)
    check.notes += notes_of(kept)
    return check


def _look(check: ModelCheck, dtype: Literal["float32", "bfloat16"], gpu: str, revision: str, device: Any) -> None:
    """Load the model, and fill in the check."""
    try:
        spec, adapter = _spec(check.source, revision)
        precision = Float32Precision() if dtype == "float32" else Bfloat16Precision(master="none")
        model = built_model.model(spec, precision, 0, device)
    except (TandemError, ValueError) as error:
        check.findings.append(str(error))
        return
    check.mended += model.renderer.mended
    check.model = _facts(spec, model, dtype)
    if adapter:
        check.model["source"] = adapter
    check.template = _template(model)
    check.fits = _fits(spec, model)
    check.memory = _memory(spec, model, dtype, gpu)
    _ask(check, model, dtype)


@contextmanager
def _kept_warnings() -> Generator[list[logging.LogRecord]]:
    """Collect the warnings of Tandem and transformers, which would go to stderr between the lines of the check."""
    from transformers.utils import logging as transformers_logging

    handler, own = BufferingHandler(sys.maxsize), logging.getLogger("tandem")
    transformers_logging.disable_default_handler()
    transformers_logging.add_handler(handler)
    own.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        own.removeHandler(handler)
        transformers_logging.remove_handler(handler)
        transformers_logging.enable_default_handler()


def notes_of(kept: list[logging.LogRecord]) -> list[str]:
    """Return what warnings mean to a user, each once. Packages that recurrent layers lack are one note."""
    texts = [record.getMessage() for record in kept if record.levelno >= logging.WARNING]
    lacks = sorted({name for text in texts for name in built_model.LACKED.findall(text)})
    notes = [text for text in texts if not built_model.LACKED.search(text)]
    if lacks:
        notes.append(
            f"recurrent layers are computed by torch, more slowly, without {', '.join(lacks)}; install what is missing"
        )
    return list(dict.fromkeys(notes))


def _spec(source: str, revision: str) -> tuple[PathModel, str]:
    """Return the [model] to load, and a line that describes an adapter: its base is loaded, and the adapter merged.
    SpecError if the model or the base is not there."""
    pinned = {"revision": revision} if revision != "main" else {}
    file = Path(source) / "adapter_config.json"
    if not file.is_file():
        spec = PathModel.model_validate({"path": source, **pinned})
        refuse_missing(spec)
        return spec, ""
    try:
        read = read_json(file)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read: {error}; save or download the adapter again") from error
    told: dict[str, Any] = read if isinstance(read, dict) else {}
    if not (base := told.get("base_model_name_or_path")):
        raise SpecError(
            f"{file}: names no base; write base_model_name_or_path: a model's directory, or a hub id "
            "(`tandem export --base ID` does)"
        )
    pinned = pinned or ({"revision": named} if (named := told.get("revision")) else {})
    spec = PathModel.model_validate({"path": base, "warm_start": source, **pinned})
    try:
        refuse_missing(spec)
    except SpecError as error:
        way = f"write where the base of this adapter is as base_model_name_or_path into {file}"
        raise SpecError(f"{error}; {way}") from error
    return spec, f"adapter, rank {told.get('r')}, of {base}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _facts(spec: PathModel, model: BuiltModel, dtype: str) -> dict[str, Any]:
    from tandem.ops.vision import sees

    module = model.policy.module
    config = module.config.get_text_config()
    gguf = gguf_of(spec.path)
    kind = "a GGUF file" if gguf else "a directory" if Path(spec.path).is_dir() else f"a hub id, at {spec.revision}"
    return {
        "source": kind,
        "family": f"{config.model_type} ({type(module).__name__})",
        "parameters": sum(tensor.numel() for tensor in module.parameters()),
        "loaded as": f"{dtype}, on {model.device.type}",
        **({"images": "sees images (tower frozen)"} if sees(module.config) else {}),
        "layers": config.num_hidden_layers,
        "attention": config._attn_implementation,
        "vocabulary": f"{config.vocab_size:,} ids, of which the tokenizer has {model.num_ids:,}",
        "context": model.context,
        "head": "tied to the embeddings" if module.config.tie_word_embeddings else "a matrix of its own",
    }


def _template(model: BuiltModel) -> dict[str, Any]:
    renderer, tokenizer = model.renderer, model.renderer.tokenizer
    named = sorted(tokenizer.convert_ids_to_tokens(list(renderer.end_ids)))
    return {
        "a question": repr(renderer.decode(renderer.prompt([{"role": "user", "content": "..."}]), skip_special=False)),
        "ends an answer": ", ".join(named),
        "begins a text": tokenizer.bos_token or "nothing",
        "padding": tokenizer.pad_token,
    }


def _fits(spec: PathModel, model: BuiltModel) -> dict[str, str]:
    from importlib.util import find_spec

    from tandem.ops import packed_attention
    from tandem.ops.vision import sees

    module = model.policy.module
    images = sees(module.config)
    bridges = {name: each for name, each in BRIDGES.items() if not (images and each.shares_memory)}
    ways = {kind: [name for name, each in bridges.items() if kind in each.engines] for kind in ("hf", "server", "vllm")}
    found = {f"engine {kind}": f"bridges {', '.join(names)}" for kind, names in ways.items()}
    found["engine vllm"] += "; vLLM is not asked here: `tandem engine check --model` does"
    found["model.attention = 'packed'"] = packed_attention.why_not(module) or "yes"
    linears = {type(part).__name__ for part in module.modules()} & {"Linear", "Conv1D"}
    found["model.lora"] = "yes" if linears else "no linear layers"
    found["model.lora.base"] = "int8, nf4" if find_spec("bitsandbytes") else "bitsandbytes is not installed"
    if images:
        found |= dict.fromkeys(("engine server", "model.lora.base"), "no, for it sees images")
    found["parallel.ranks"] = built_model.why_not_ranks(model, spec.path) or "yes"
    return found


def _memory(spec: PathModel, model: BuiltModel, dtype: str, gpu: str) -> dict[str, str]:
    """Return what SFT needs by the planner, all weights and LoRA, with the settings that `tandem init` writes."""
    billions = sum(tensor.numel() for tensor in model.policy.module.parameters()) / 1e9
    rows = min(_ROW_TOKENS, model.context)

    def written(way: Way, gpu: str) -> RunSpec:
        told = tomllib.loads(spec_for(FirstAnswers("imitate", spec.path, "rows", gpu), billions, way))
        told["model"]["revision"] = spec.revision
        told.setdefault("precision", {"weights": dtype})  # init chooses it for a GPU
        return parse_spec(told)

    gpu, kind, gib, where = _machine(gpu, written("full", "none"))
    ways: dict[str, Way] = {"all weights": "full", "LoRA, rank 16": "lora"}
    found: dict[str, str] = {}
    for name, way in ways.items():
        try:
            plan = plans.plan_run(written(way, gpu), gpu=kind, memory_gib=gib, row_tokens=rows)
        except TandemError as error:
            found[name] = str(error)
            continue
        verdict = "fits" if plan.fits else "does not fit"
        found[name] = f"{plan.peak_gib:.2f} GiB of {plan.memory_gib:.1f} ({where}): {verdict}"
    run = written("lora", gpu)
    assert isinstance(run, SftSpec)
    found["of"] = (
        f"SFT as `tandem init` writes it, estimated: rows of {rows:,} tokens, batch_size = {run.train.batch_size}, "
        f"micro_tokens = {run.train.micro_tokens:,}, activations = '{run.model.activations}', {run.precision.weights}"
    )
    return found


def _machine(gpu: str, spec: RunSpec) -> tuple[str, str, float, str]:
    """Return the answer to `tandem init --gpu`, the kind and the GiB to plan for, and their name: of this machine if
    `gpu` is empty. A GPU of which only the memory is known is planned as an h200 of that memory, for seconds are not
    shown."""
    if gpu == "none":
        return gpu, "cpu", 0.0, "cpu"
    if gpu:
        card = card_named(gpu)
        return gpu, card or kind_of(spec), gpu_gib(gpu), card or f"a GPU of {gpu} GiB"
    kind, gib, _ = plans.live_memory(spec)
    if kind == "cpu":
        return "none", kind, gib, kind
    nearest = min((each for each in gpus() if each != "none"), key=lambda each: abs(gpus()[each] - gib))
    return nearest, kind, gib, "this GPU"


def _ask(check: ModelCheck, model: BuiltModel, dtype: str) -> None:
    """Ask one question, and compare the engine's logprobs of its answer with the trainer's."""
    prompt = model.renderer.prompt([{"role": "user", "content": QUESTION}])
    routes = _Routes(model.policy.module)
    try:
        told = asyncio.run(_answered(model, prompt, routes))
        of_engine = routes.taken()
        row = Trajectory(
            ids=[*prompt, *told.ids],
            trained=[False] * len(prompt) + [True] * len(told.ids),
            logprobs=[0.0] * len(prompt) + list(told.logprobs),
            versions=[-1] * len(prompt) + list(told.versions),
        )
        ours = training.scorer(model, 4096)(row)
    except SpecError as error:  # another engine may serve it, and recorded data needs none
        check.fits["engine hf"] = check.fits["engine server"] = str(error)
        return
    except (TandemError, RuntimeError, ValueError, TypeError) as error:  # from transformers' code of the model
        check.findings.append(f"the embedded engine cannot serve it: {type(error).__name__}: {error}")
        return
    gap = sum(abs(a - b) for a, b in zip(ours, told.logprobs, strict=True)) / len(ours)
    check.answer = {
        "to": QUESTION,
        "is": repr(model.renderer.decode(told.ids, skip_special=False)),
        "nats a token, engine from trainer": gap,
    }
    if of_engine:
        check.answer["experts that differ"] = _routes_that_differ(of_engine, routes.taken(), len(row.ids) - 1)
    if not gap <= _MOST_GAP[dtype]:
        check.findings.append(
            f"engine and trainer differ by {gap:.2g} nats a token, where {_MOST_GAP[dtype]:g} is the most in {dtype}: "
            "a run would end with LogprobGap"
        )


class _Routes:
    """Notes which experts each token is sent to, in each layer of a mixture of experts."""

    def __init__(self, module: Any) -> None:
        self._noted: dict[str, list[Any]] = {}
        for name, part in module.named_modules():
            if type(part).__name__.endswith("Router"):
                part.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, _part: Any, _given: Any, told: Any) -> None:
        chosen_TK = told[-1] if isinstance(told, tuple) else told
        if not chosen_TK.is_floating_point():
            self._noted.setdefault(name, []).append(chosen_TK.detach())

    def taken(self) -> list[Any]:
        """Return the experts chosen since the last call, [tokens, experts of a token], of each layer."""
        import torch

        noted, self._noted = self._noted, {}
        return [torch.cat(each) for each in noted.values()]


def _routes_that_differ(ours: list[Any], theirs: list[Any], count: int) -> str:
    """Compare the choices for the first `count` tokens; the engine does not compute the last one."""
    differ = [(a[:count].sort(1)[0] != b[:count].sort(1)[0]).any(1) for a, b in zip(ours, theirs, strict=True)]
    found, of = sum(int(each.sum()) for each in differ), count * len(differ)
    return f"{found} of {of:,} choices, one for each token and layer ({found / of:.1%})"


async def _answered(model: BuiltModel, prompt: list[int], routes: _Routes) -> Any:
    engine = standalone_engines.embedded(HfEngineSpec(), model, inline=True)
    bridge = run_engines.inproc_bridge()
    await engine.attach(bridge.source(engine.receivers))
    bridge.send(model.policy.weights(0, "live"))
    await engine.load(0)
    routes.taken()  # what was computed before the answer
    try:
        return await engine.generate(prompt, Sampling(max_tokens=_TOKENS, temperature=0.0))
    finally:
        await engine.close()
