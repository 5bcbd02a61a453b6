"""What a run with a model that sees has beside the model: its images, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import SpecError
from tandem.spec.model import ModelSpec, PresetModel
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


def refuse_unsupported(spec: RunSpec) -> None:
    """Raise SpecError for what does not support a model that sees images."""
    kind = getattr(spec.algorithm, "kind", "")
    if kind in ("distill", "kto"):
        raise SpecError(
            f"algorithm.kind = '{kind}': does not support a model that sees images; choose another algorithm, or a "
            "model of text"
        )
    if isinstance(spec, RlSpec) and spec.engine.kind in ("server", "remote"):
        raise SpecError(
            f"engine.kind = '{spec.engine.kind}': takes no images of a model that sees; choose 'hf' or 'vllm'"
        )
    if isinstance(spec, RlSpec) and spec.sync.traits.shares_memory:
        raise SpecError(
            f"sync.bridge = '{spec.sync.bridge}': does not support a model that sees images; set sync.bridge = 'disk'"
        )
