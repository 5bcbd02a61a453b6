"""Receive versions in one vLLM worker, put them into the served memory, and read them back.

consumes: versions, from the engine's end of a bridge     waits for: the other end, within the link's deadline produces:
digests of what is served, read back from it

A version arrives on a separate thread, beside the served weights (`stage`), and is checked there. The caller pauses the
engine only while a full version is copied over the served weights and read back. That happens in place, without a copy
to return to. So everything that can be refused is refused before the first byte is written. A failure after that sets
`torn`, and the engine serves nothing until a whole version has arrived. An adapter goes into a slot that no request
uses.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tandem.bridge.shared import cuda_ipc
from tandem.bridge.shared.receiver import SharedEnd
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.device_names import device_name
from tandem.ops.named_tensors import views_of_others, whereabouts
from tandem.ops.phase_timer import Phases
from tandem.protocols import WeightSource
from tandem.spec.bridges import traits_of
from tandem.types import Weights
from tandem.vllm_worker import served_memory
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.layer_readers import checkpoints_names
from tandem.vllm_worker.lora_slots import LoraSlots
from tandem.vllm_worker.served_memory import TensorLayout, layout_of
from tandem.vllm_worker.weight_sources import EngineEnd, open_source

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version that has arrived and was checked."""

    weights: Weights
    tensors: Mapping[str, Tensor]
    """Those that are here whole; of a full version, only what the engine computes itself may be asked for here."""
    moves: served_memory.Moves
    """Of a full version: the copies that apply it."""
    seconds: Mapping[str, float]


Look: TypeAlias = Callable[[Weights, Mapping[str, Tensor]], served_memory.Moves]


class Incoming:
    """Receives one version on a thread, while the engine continues to serve."""

    def __init__(self, source: WeightSource, version: int, rank: int, device: torch.device, look: Look) -> None:
        """`look`: checks what arrived, on that thread."""
        self.version = version
        self._source, self._rank, self._device, self._look = source, rank, device, look
        self._future: Future[Arrived] = Future()
        threading.Thread(target=self._run, name=f"incoming {version}", daemon=True).start()

    def here(self, patience_s: float | None) -> bool:
        """Wait up to `patience_s`; return whether the version is here or failed. None waits as long as the link
        allows."""
        if not self._future.done():
            try:
                self._future.exception(patience_s)
            except TimeoutError:
                return False
        return True

    def take(self) -> Arrived:
        """Return the version or raise its error; wait for it."""
        return self._future.result()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread uses the first GPU
            self._future.set_result(self._receive())
        except BaseException as error:  # noqa: BLE001 - take() raises it
            self._future.set_exception(error)

    def _receive(self) -> Arrived:
        phases = Phases()
        weights = self._source.receive(self.version, self._rank)
        phases.end("wait")
        tensors = {part.name: part.tensor for part in weights.parts() if tuple(part.tensor.shape) == part.full_shape}
        moves = self._look(weights, tensors)
        phases.end("check")
        return Arrived(weights, tensors, moves, phases.seconds)


class EngineWorker:
    def __init__(self, theirs: Any) -> None:
        """`theirs`: vLLM's worker object."""
        parallel = theirs.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise SyncError("layout: the model is spread over pipeline stages; start vLLM without them")
        self._theirs, self._model = theirs, theirs.get_model()
        self._rank, self._world = int(theirs.rank), int(parallel.tensor_parallel_size)
        self._boot_id = uuid.uuid4().hex
        self._layout: TensorLayout = layout_of(self._model)
        self._adapters: LoraSlots | None = None
        if (manager := getattr(theirs.model_runner, "lora_manager", None)) is not None:
            fused = checkpoints_names(self._model)
            self._adapters = LoraSlots(manager, self._layout, fused, CheckpointNames(self._model))
        self._source: EngineEnd | None = None
        self._verify_adapters = False
        """Adapters arrive unchecked; this worker compares each with what was sent."""
        self._incoming: Incoming | None = None
        self._proof: Answer = {}
        self._served = served_memory.ServedMemory(self._layout)
        self._shared_params: dict[str, str] = {}
        self._version, self._torn = -1, ""
        self._remembered: list[served_memory.PieceDigest] = []

    def vocabulary(self, num_ids: int) -> Answer:
        """Mask ids from `num_ids` on: they pad the matrix, are no tokens and must never be sampled."""
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
        self._source = self._incoming = None
        source = open_source(link, self._theirs.device)
        try:
            reply = self._attached(source, link)
        except SyncError:
            source.close()
            raise
        self._source = source
        return reply

    def _attached(self, source: EngineEnd, link: Mapping[str, Any]) -> Answer:
        traits = traits_of(link)
        handles = self._share_weights(source) if traits is not None and traits.shares_memory else {}
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
        if self._world > 1 and source.carries in ("full", "live"):
            reply["boxes"] = self._layout.boxes()
        if source.carries == "adapter":
            if other_form := self._layout.of_other_form():
                raise SyncError(
                    f"adapters: '{other_form[0]}' is served in another form than in the checkpoint, so vLLM's base "
                    "cannot be compared with the trainer's; train all weights (no model.lora)"
                )
            if self._adapters is None:
                raise SyncError("adapters: vLLM was started without --enable-lora")
            self._adapters.reuses_tensors = reply["copied"] = source.reuse_buffer()
            # With several workers none holds a whole adapter, so none can compare it where it is served.
            self._verify_adapters = self._world == 1 and source.verify_where_served()
            reply["adapter_dtype"] = self._adapters.dtype
            reply["pieces"] = self._served.pieces()  # of the base model of the adapters
            if link.get("base_wanted"):
                reply["base_memory"] = self._exported_base()
        return reply

    def stage(self, version: int, patience_s: float) -> Answer:
        """Return whether that version has arrived beside the served one. The first call starts to receive it."""
        return {"arrived": self._expected(version).here(patience_s) and bool(self._taken(version))}

    def load(self, version: int, into: str = "", patience_s: float | None = None, later: bool = False) -> Answer:
        """Serve that version. `into`: the adapter whose slot may be overwritten. `patience_s`: as for `stage`. `later`:
        the caller asks for the digests with `proof`, after requests go on."""
        if not self._expected(version).here(patience_s):
            return {"arrived": False}
        arrived = self._taken(version)
        self._incoming, weights, phases = None, arrived.weights, Phases()
        answer: Answer = {}
        match weights.kind:
            case "live":
                answer = {"fingerprints": self._proven_places(weights)}
                phases.end("check")
            case "full":
                self._overwrite(arrived, phases)
            case "adapter":
                answer = self._into_slot(arrived, into, phases)
                assert self._source is not None
                self._source.prefetch(self._rank)
        if weights.kind != "adapter":
            self._version = version
        if weights.kind == "full" and not later:
            answer = self.proof(version)
        return {**answer, "arrived": True, "version": version, "seconds": _added(arrived.seconds, phases.seconds)}

    def proof(self, version: int) -> Answer:
        """Return the digests that were read back when that version was loaded."""
        if self._proof.get("version") != version:
            raise SyncError(f"engine: version {version} was not the last that was loaded here")
        shapes = {name: shape for name, (_, shape) in self._layout.forms().items()}
        return {**self._proof, "shapes": shapes}

    def _expected(self, version: int) -> Incoming:
        if self._source is None:
            raise SyncError("engine: load() before attach(): the source of weights is unknown")
        if self._incoming is None or self._incoming.version != version:
            device = self._theirs.device
            self._incoming = Incoming(self._source, version, self._rank, device, self._look)
        return self._incoming

    def _taken(self, version: int) -> Arrived:
        try:
            return self._expected(version).take()
        except BaseException:
            self._incoming = None  # the next call starts to receive it again
            raise

    def _look(self, weights: Weights, tensors: Mapping[str, Tensor]) -> served_memory.Moves:
        """Refuse a version that does not fit, on the thread that received it; return the copies that apply it."""
        if weights.kind == "full" and weights.rows is not None:
            return served_memory.moves_of_parts(self._layout, list(weights.parts()))
        if weights.kind == "full":
            served_memory.check(self._layout, tensors)
            return served_memory.moves(self._layout, tensors)
        if weights.kind == "adapter":
            self._slots().check(tensors, weights.adapter)
        return []

    def _slots(self) -> LoraSlots:
        if self._adapters is None:
            raise SyncError("adapters: vLLM was started without --enable-lora")
        return self._adapters

    def adapter(self, name: str) -> Answer:
        """Return what the slot of an adapter holds, after vLLM loaded it."""
        phases = Phases()
        pieces = self._slots().served_pieces(name)
        phases.end("digest")
        return {"pieces": pieces, "shapes": self._slots().shapes(name), "seconds": phases.seconds}

    def put(self, path: str, rank: int, expected: Mapping[str, str]) -> Answer:
        """Stage the adapter in a safetensors file, whose tensors have these fingerprints; return the name to load it
        by."""
        from safetensors.torch import load_file

        slots, config = self._slots(), {"r": rank, "lora_alpha": rank}
        tensors = load_file(path, str(self._theirs.device))
        slots.check(tensors, config)
        name = slots.stage(tensors, config)
        slots.check_staged(name, expected)
        return {"adapter": name}

    def drop(self, name: str) -> Answer:
        if self._adapters is not None:
            self._adapters.drop(name)
        return {"adapters": [] if self._adapters is None else self._adapters.names()}

    def digest(self) -> Answer:
        shapes = {name: shape for name, (_, shape) in self._layout.forms().items()}
        return {"version": self._version, "pieces": self._served.pieces(), "shapes": shapes}

    def remember(self, adapters: Sequence[str] = ()) -> Answer:
        """Remember the digests of the served weights, before the trainer may write them or they move to the host and
        back. `adapters`: those that vLLM has loaded."""
        self._remembered = self._all_served(adapters)
        return {}

    def intact(self, adapters: Sequence[str] = ()) -> Answer:
        return {"intact": self._all_served(adapters) == self._remembered}

    def free_bytes(self) -> Answer:
        """Return the free bytes of the GPU."""
        on_gpu = self._theirs.device.type == "cuda"
        return {"free": torch.cuda.mem_get_info(self._theirs.device)[0] if on_gpu else 0}

    def status(self) -> Answer:
        return {
            "boot_id": self._boot_id,
            "version": self._version,
            "untouched": not self._torn,
            "torn": self._torn,
            "adapters": [] if self._adapters is None else self._adapters.names(),
            "adapter_dtype": "" if self._adapters is None else self._adapters.dtype,
        }

    def _all_served(self, adapters: Sequence[str]) -> list[served_memory.PieceDigest]:
        pieces = self._served.pieces()
        if self._adapters is not None:
            pieces += [piece for name in adapters for piece in self._adapters.served_pieces(name)]
        return pieces

    # --- a full version

    def _overwrite(self, arrived: Arrived, phases: Phases) -> None:
        weights, shapes = arrived.weights, {name: shape for name, (_, shape) in self._layout.forms().items()}
        if self._theirs.device.type == "cuda":
            torch.cuda.synchronize()  # a step that was given up may still read
        self._torn = f"version {weights.version} was not written completely"
        served_memory.write(self._layout, arrived.tensors, arrived.moves)
        phases.end("apply")
        pieces = self._served.pieces()
        served_memory.check_served(pieces, weights.expected, shapes)
        phases.end("digest")
        self._torn = ""
        self._proof = {"version": weights.version, "pieces": pieces}

    def _into_slot(self, arrived: Arrived, into: str, phases: Phases) -> Answer:
        """Write the adapter over an unused one, or stage it under a new name for vLLM to load. One that differs from
        what was sent is refused: no request names it, and the next one may overwrite it."""
        slots, expected = self._slots(), arrived.weights.expected
        name = slots.stage(arrived.tensors, arrived.weights.adapter, into)
        phases.end("stage")
        if name != into:
            if self._verify_adapters:
                slots.check_staged(name, expected)
                phases.end("digest")
            return {"adapter": name, "loaded": False}
        digests = digest.texts(slots.served_numbers(name))  # of the same pieces as `adapter` reported
        slots.check_served(name, digests, expected)
        phases.end("digest")
        return {"adapter": name, "loaded": True, "digests": "".join(digests)}

    # --- the single copy

    def _share_weights(self, source: EngineEnd) -> Answer:
        if getattr(self._theirs.vllm_config.model_config, "enable_sleep_mode", False):
            raise SyncError("shared: memory that vLLM may put to sleep cannot be shared; start it without sleep mode")
        if other_form := self._layout.of_other_form():
            raise SyncError(
                f"shared: '{other_form[0]}' is served in another form than it is trained, so it cannot be one memory; "
                "set sync.bridge = 'disk'"
            )
        if self._theirs.device.type == "cuda":
            source.memory_for(self._views())
        else:
            assert isinstance(source, SharedEnd)
            self._move_into(source)
        source.attached({})
        self._shared_params = self._parameters()
        return {"handles": source.reply["handles"]}

    def _move_into(self, source: SharedEnd) -> None:
        """On a CPU: move vLLM's parameters into memory that can be shared."""
        params = dict(self._model.named_parameters())
        views = views_of_others(params)
        homes = source.memory_for({path: param for path, param in params.items() if path not in views})
        for path, (owner, offset) in views.items():
            view, home = params[path], homes[owner]
            view.data = home.as_strided(view.shape, view.stride(), int(home.storage_offset()) + offset)
        for path, home in homes.items():
            home.copy_(params[path].data)
            params[path].data = home
        self._layout = layout_of(self._model)
        self._served = served_memory.ServedMemory(self._layout)
        source.lend(self._views())

    def _exported_base(self) -> Answer:
        """Export the base for a trainer on this GPU, which has the same values. It is never written."""
        if self._theirs.device.type != "cuda":
            why_not = f"the engine is on {self._theirs.device}, and only GPU memory can be shared"
        elif self._world > 1:
            why_not = f"the engine's base lies on {self._world} GPUs"
        elif getattr(self._theirs.vllm_config.model_config, "enable_sleep_mode", False):
            why_not = "the engine may put its memory to sleep"
        else:
            try:
                return {"why_not": "", "exported": cuda_ipc.export(self._views())}
            except SyncError as error:
                why_not = str(error)
        return {"why_not": why_not}

    def _views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for name, pieces in self._layout.pieces.items():
            if len(pieces) != 1:
                raise SyncError(
                    f"shared: '{name}' lies in {len(pieces)} places, and a trainer's tensor must lie in one"
                )
            views[name] = pieces[0].view
        return views

    def _proven_places(self, weights: Weights) -> Mapping[str, str]:
        """Return the places of all tensors, after a check that the model still computes with the shared memory."""
        self._served.check_derived()
        fresh = self._parameters()
        if odd := sorted(
            path
            for path in fresh.keys() | self._shared_params.keys()
            if fresh.get(path) != self._shared_params.get(path)
        ):
            raise SyncError(f"shared: '{odd[0]}' is no longer served from the memory that the trainer writes")
        return dict(weights.expected)

    def _parameters(self) -> dict[str, str]:
        """Return the memory of each of the model's parameters. Their shapes fix where in them a tensor is."""
        return {path: whereabouts(param) for path, param in self._model.named_parameters(remove_duplicate=False)}


def _added(some: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: some.get(name, 0.0) + others.get(name, 0.0) for name in (*some, *others)}


def _vllm_version() -> str:
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    return __version__
