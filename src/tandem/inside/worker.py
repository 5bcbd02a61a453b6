"""One worker of an engine, as a trainer's bridge sees it: what it serves, and how another version gets there.

consumes: versions, from the engine's end of a bridge     waits for: the other end, within the link's deadline
produces: digests of what is served, read back from it

The caller pauses the engine around a full version: it is written in place, and there is no copy to go back to. So all
that can be refused is refused before the first byte; what fails after it leaves `torn` behind, and nothing may be
served until a version has arrived whole. An adapter is staged beside what is served, and touches nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.inside import apply
from tandem.inside.layout import Layout, layout_of
from tandem.inside.lora_slots import LoraSlots
from tandem.inside.sources import EngineEnd, open_source
from tandem.ops import digest
from tandem.ops.devices import device_name
from tandem.ops.phases import Phases
from tandem.types import Weights

Answer = dict[str, Any]


class Worker:
    def __init__(self, theirs: Any) -> None:
        """`theirs`: vLLM's worker."""
        parallel = theirs.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise SyncError("layout: the model is spread over pipeline stages; start vLLM without them")
        self._theirs, self._model = theirs, theirs.get_model()
        self._rank, self._world = int(theirs.rank), int(parallel.tensor_parallel_size)
        self._boot_id = uuid.uuid4().hex
        self._layout: Layout = layout_of(self._model)
        self._adapters: LoraSlots | None = None
        if (manager := getattr(theirs.model_runner, "lora_manager", None)) is not None:
            fused = getattr(self._model, "packed_modules_mapping", None) or {}
            self._adapters = LoraSlots(manager, self._layout, fused)
        self._source: EngineEnd | None = None
        self._housed: dict[str, str] = {}
        self._version, self._torn = -1, ""
        self._remembered: list[apply.PieceDigest] = []

    def vocabulary(self, num_ids: int) -> Answer:
        """Ids from `num_ids` on pad the matrix and stand for no token: never sampled, no part of any distribution."""
        compute = type(self._model).compute_logits

        def masked(*args: Any, **kwargs: Any) -> Tensor | None:
            logits = compute(self._model, *args, **kwargs)
            if logits is not None:  # not every worker of a tensor-parallel group has them
                logits[..., num_ids:] = -torch.inf
            return logits

        self._model.compute_logits = masked
        return {"num_ids": num_ids}

    def attach(self, link: Mapping[str, Any]) -> Answer:
        if self._source is not None:
            self._source.close()
        self._source = None
        source = open_source(link)
        handles = self._house(source) if link["mode"] == "shared" else {}
        reply: Answer = {
            "boot_id": self._boot_id,
            "rank": self._rank,
            "world": self._world,
            "device": device_name(self._theirs.device),
            "versions": {"vllm": _vllm_version(), "torch": str(torch.__version__)},
            "layout": self._layout.forms(),
            "derived": sorted(self._layout.tables()),
            "tied": dict(self._layout.aliases),
            "places": [[piece.name, piece.param, *piece.box] for piece in self._layout],
            "digests": digest.fused(self._theirs.device),
            **handles,
        }
        if source.carries == "adapter":
            if self._adapters is None:
                raise SyncError("adapters: vLLM was started without --enable-lora")
            reply["adapter_dtype"] = self._adapters.dtype
            reply["pieces"] = apply.served_pieces(self._layout)  # of the base that adapters stand upon
        self._source = source
        return reply

    def load(self, version: int) -> Answer:
        if self._source is None:
            raise SyncError("engine: load() before attach(): it does not know where weights come from")
        phases = Phases()
        weights = self._source.receive(version, self._rank)
        phases.end("wait")
        match weights.kind:
            case "live":
                answer: Answer = {"fingerprints": self._proven_places(weights)}
            case "full":
                answer = self._overwrite(weights, phases)
            case "adapter":
                if self._adapters is None:
                    raise SyncError("adapters: vLLM was started without --enable-lora")
                name = self._adapters.stage(version, dict(weights.tensors()), weights.adapter)
                answer = {"adapter": name, "pieces": [], "shapes": {}}
                phases.end("stage")
        if weights.kind != "adapter":
            self._version = version
        return {"version": version, "seconds": phases.seconds, **answer}

    def adapter(self, name: str) -> Answer:
        """What the slot of an adapter holds, after vLLM was asked to load it."""
        if self._adapters is None:
            raise SyncError("adapters: vLLM was started without --enable-lora")
        phases = Phases()
        pieces = self._adapters.served_pieces(name)
        phases.end("digest")
        return {"pieces": pieces, "shapes": self._adapters.shapes(name), "seconds": phases.seconds}

    def drop(self, name: str) -> Answer:
        if self._adapters is not None:
            self._adapters.drop(name)
        return {"adapters": [] if self._adapters is None else self._adapters.names()}

    def digest(self) -> Answer:
        shapes = {name: shape for name, (_, shape) in self._layout.forms().items()}
        return {"version": self._version, "pieces": apply.served_pieces(self._layout), "shapes": shapes}

    def remember(self, adapters: Sequence[str] = ()) -> Answer:
        """Somebody else is about to write into this memory, or it goes to the host and comes back. `adapters`: those
        that vLLM has loaded."""
        self._remembered = self._all_served(adapters)
        return {}

    def intact(self, adapters: Sequence[str] = ()) -> Answer:
        return {"intact": self._all_served(adapters) == self._remembered}

    def free_bytes(self) -> Answer:
        """Of the GPU, for whoever asks first."""
        on_gpu = self._theirs.device.type == "cuda"
        return {"free": torch.cuda.mem_get_info(self._theirs.device)[0] if on_gpu else 0}

    def status(self) -> Answer:
        return {
            "boot_id": self._boot_id,
            "version": self._version,
            "untouched": not self._torn,
            "torn": self._torn,
            "adapters": [] if self._adapters is None else self._adapters.names(),
        }

    def _all_served(self, adapters: Sequence[str]) -> list[apply.PieceDigest]:
        pieces = apply.served_pieces(self._layout)
        if self._adapters is not None:
            pieces += [piece for name in adapters for piece in self._adapters.served_pieces(name)]
        return pieces

    # --- a full version

    def _overwrite(self, weights: Weights, phases: Phases) -> Answer:
        arrived = dict(weights.tensors())
        apply.check(self._layout, arrived)
        phases.end("check")
        self._torn = f"version {weights.version} was not written to its end"
        apply.write(self._layout, arrived)
        phases.end("apply")
        answer = self.digest()
        apply.check_served(answer["pieces"], weights.expected, answer["shapes"])
        phases.end("digest")
        self._torn = ""
        return answer

    # --- the single copy

    def _house(self, source: EngineEnd) -> Answer:
        if self._theirs.device.type != "cuda":
            raise SyncError(
                "shared: vLLM's CPU build keeps weights in memory of its own; use sync.bridge = 'broadcast' or 'disk'"
            )
        if self._world > 1:
            raise SyncError("shared: one trainer process cannot live in the shards of several workers")
        if getattr(self._theirs.vllm_config.model_config, "enable_sleep_mode", False):
            raise SyncError("shared: memory that vLLM may put to sleep cannot be shared; start it without sleep mode")
        tensors = self._views()
        source.house(tensors)
        source.attached({})
        self._housed = {name: _whereabouts(tensor) for name, tensor in tensors.items()}
        return {"handles": source.reply["handles"]}

    def _views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for name, pieces in self._layout.pieces.items():
            if len(pieces) != 1:
                raise SyncError(f"shared: '{name}' lies in {len(pieces)} places; no tensor of a trainer can")
            views[name] = pieces[0].view
        return views

    def _proven_places(self, weights: Weights) -> Mapping[str, str]:
        """What the model computes with now is the very memory that was handed out."""
        self._layout.check_derived()
        fresh = layout_of(self._model)
        for name, pieces in fresh.pieces.items():
            if _whereabouts(pieces[0].view) != self._housed.get(name):
                raise SyncError(f"shared: '{name}' is no longer served from the memory that the trainer writes")
        return dict(weights.expected)


def _whereabouts(tensor: Tensor) -> str:
    return f"{tensor.data_ptr():x} {list(tensor.shape)} {list(tensor.stride())} {tensor.dtype}"


def _vllm_version() -> str:
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    return __version__
