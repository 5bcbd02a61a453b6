"""Write a model card from the files of a run's directory, and nothing else."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tandem.obs.claims import caveat, evidence, figure, headline
from tandem.obs.run_history import History, evaluations, read_history, total

_WITH_IMAGES = """

With images, in Python with transformers, Pillow and torchvision (Tandem's two commands take text only):

```python
from PIL import Image
from transformers import pipeline

model = pipeline("image-text-to-text", model="DIR")
parts = [{"type": "image", "image": Image.open("photo.png")}, {"type": "text", "text": "What is this?"}]
print(model(text=[{"role": "user", "content": parts}], return_full_text=False)[0]["generated_text"])
```"""


def takes_images(directory: Path) -> bool:
    """Return whether the files of a copy have a processor of images."""
    return any((directory / name).exists() for name in ("preprocessor_config.json", "processor_config.json"))


def model_card(
    run_dir: Path, kind: str, step: int | None = None, *, base: str = "", no_modelfile: str = "", sees: bool = False
) -> str:
    """Return the card of a run's model. `kind`: adapter, model, or gguf-KIND. `step`: of the checkpoint
    of that step; the card then has no verdict. `base`: the id of an adapter's base on the hub. `no_modelfile`: why a
    GGUF file has no Modelfile beside it. `sees`: the model takes images."""
    history = read_history(run_dir)
    if step is not None:
        history = _until(history, step)
    spec: dict[str, Any] = tomllib.loads(history.spec)
    if base:
        spec["model"]["path"] = base
    parts = [_head(spec, kind, sees), f"# {history.name}"]
    if step is None:
        parts += [headline(history.status), evidence(history.status), caveat(history.status)]
    else:
        parts += [f"The model after optimizer step {step}."]
    parts += [_table(history), _facts(history, spec), _use(kind, no_modelfile, sees), _spec(history.spec)]
    return "\n\n".join(part for part in parts if part) + "\n"


def learned_card(name: str, version: int, kind: Literal["adapter", "model"], base: str, *, sees: bool) -> str:
    """Return the card of an online server's model. `sees`: it takes images."""
    spec = {"recipe": "online", "model": {"path": base} if base else {}}
    told = f"Version {version} of what a server learned while it answered (`tandem online serve`)."
    return "\n\n".join([_head(spec, kind, sees), f"# {name}", told, _use(kind, sees=sees)]) + "\n"


def _until(history: History, step: int) -> History:
    """Return the history as it was when that step ended."""
    rows = [row for row in history.rows if row["step"] <= step]
    known = {name: value for name, value in history.eval.items() if name != "after"}
    return replace(history, rows=rows, status={**history.status, "steps_done": step, "eval": known})


def _head(spec: dict[str, Any], kind: str, sees: bool) -> str:
    library = {"adapter": "peft", "model": "transformers"}.get(kind, "gguf")
    lines = ["---", f"library_name: {library}"]
    base = spec["model"].get("path", "")
    if base and not Path(base).is_absolute() and not Path(base).exists():  # do not publish a path of this machine
        lines.append(f"base_model: {json.dumps(base)}")
    task = "image-text-to-text" if sees else "text-generation"
    task = "text-classification" if spec.get("algorithm", {}).get("kind") == "reward_model" else task
    return "\n".join([*lines, f"pipeline_tag: {task}", f"tags: [tandem-rl, {spec['recipe']}]", "---"])


def _table(history: History) -> str:
    found = evaluations(history)
    if not found:
        return ""
    rows = [f"| {item.label} | {item.step} | {figure(history.status, item.value)} |" for item in found]
    return "\n".join(["## Held out", "", f"| when | step | {history.measure} |", "|---|---:|---:|", *rows])


def _facts(history: History, spec: dict[str, Any]) -> str:
    facts = [
        ("recipe", spec["recipe"]),
        ("algorithm", spec.get("algorithm", {}).get("kind", "")),
        ("environment", _public(spec.get("environment", {}).get("name", ""))),
        ("optimizer steps", str(history.status.get("steps_done", ""))),
        ("tokens trained on", f"{total(history.rows, 'tokens/trained'):,.0f}"),
        ("seed", str(spec.get("seed", 0))),
        ("adapter rank", str(spec["model"].get("lora", {}).get("rank", ""))),
    ]
    return "\n".join(["## Training", "", *(f"- {label}: {value}" for label, value in facts if value not in ("", "0"))])


def _use(kind: str, no_modelfile: str = "", sees: bool = False) -> str:
    if kind == "adapter":
        return "## Use\n\nAn adapter in PEFT's format: load it on its base model."
    if kind.startswith("gguf-"):
        ollama = "With Ollama: `ollama create NAME -f Modelfile`, then `ollama run NAME`."
        return (
            f"## Use\n\nA GGUF file of kind {kind.removeprefix('gguf-')}, for llama.cpp and what is built on it. With "
            f"Tandem: `tandem chat FILE`. {f'No Modelfile for Ollama: {no_modelfile}.' if no_modelfile else ollama}"
        )
    tandem = "A whole model in Hugging Face format. With Tandem: `tandem serve DIR`, or `tandem chat DIR`."
    return f"## Use\n\n{tandem}{_WITH_IMAGES if sees else ''}"


def _spec(text: str) -> str:
    """Return the spec without values that name this machine."""
    raw: dict[str, Any] = tomllib.loads(text)
    stage = {key: value for key, value in raw.get("train", {}).items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in stage.items()]
    return "\n".join(["## Settings", "", "```toml", "[train]", *lines, "```"])


def _public(name: str) -> str:
    """Return an environment's name for the public: `sort`, `package.module:Class`; of a path only the file name."""
    return name.rsplit("/", 1)[-1]
