"""What a run with a model that sees has beside the model: its images, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import SpecError
from tandem.runs.planner.model_shape import NoPlan, read_config, shape_of
from tandem.spec import hardware
from tandem.spec.model import SEEING, ModelSpec, PresetModel
from tandem.spec.run import RlSpec, RunSpec

if TYPE_CHECKING:
    from tandem.protocols import ImageSource


def of_model(
    spec: ModelSpec, module: Any, images: Path | None, way_out: str = ""
) -> tuple[ImageSource | None, dict[str, bytes]]:
    """Freeze the vision tower of a module that sees. Return what the model makes of the images in a directory, and the
    files that say so. `way_out`: where such a model is not supported, what to do instead."""
    from tandem.io.image_store import ImageStore
    from tandem.model.export_copy import processor_files
    from tandem.model.load_checkpoint import refuse_images
    from tandem.ops.vision import freeze_tower, sees
    from tandem.text.model_images import ModelImages

    if isinstance(spec, PresetModel) or module is None or not sees(module.config):
        return None, {}
    if way_out:
        refuse_images(module.config, spec.path, "model.path", way_out)
    freeze_tower(module)
    files = processor_files(spec.path, spec.revision)
    if images is None:
        return None, files
    try:
        source = ModelImages(spec.path, ImageStore(images), revision=spec.revision)
    except (OSError, ValueError) as error:
        raise SpecError(f"model.path = '{spec.path}': its image processor cannot be loaded: {error}") from error
    return source, files


def sees_images(spec: RunSpec) -> bool:
    """Return whether the run's model sees, from its config alone."""
    return _config(spec).get("model_type") == SEEING


def _config(spec: RunSpec) -> Mapping[str, Any]:
    if not isinstance(spec.model, PresetModel):
        with suppress(NoPlan):  # its loader says what is wrong with the config
            return read_config(spec.model.path, spec.model.revision)
    return {}


def choose(spec: RunSpec, machine: hardware.Hardware) -> tuple[RunSpec, list[hardware.HardwareChoice]]:
    """Choose what the spec leaves out. SpecError for what does not support its model, before anything is loaded."""
    config, weights = _config(spec), 0
    sees = config.get("model_type") == SEEING
    with suppress(NoPlan):
        weights = shape_of(config, "model.path").total
    found = hardware.choose(spec, machine, sees=sees, weights=weights)
    refuse_unsupported(found[0], sees)
    return found


def refuse_unsupported(spec: RunSpec, sees: bool) -> None:
    """Raise SpecError for all that does not support a model that sees images, if it is one."""
    kind, ranks, found = getattr(spec.algorithm, "kind", ""), spec.parallel.ranks, list[str]()
    if kind in ("distill", "kto"):
        found.append(f"algorithm.kind = '{kind}': does not support a model that sees images; choose another one")
    if ranks > 1:
        found.append(f"parallel.ranks = {ranks}: one process trains a model that sees images; set parallel.ranks = 1")
    if isinstance(spec, RlSpec) and (engine := spec.engine.kind) in ("server", "remote"):
        found.append(f"engine.kind = '{engine}': takes no images; choose 'vllm', or 'hf' without [sync]")
    elif isinstance(spec, RlSpec) and spec.sync.traits.shares_memory:
        found.append("sync.bridge = 'shared': does not support a model that sees images; set sync.bridge = 'disk'")
    if found and sees:
        raise SpecError("\n".join(found))
