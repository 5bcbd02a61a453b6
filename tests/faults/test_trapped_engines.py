"""Traps in the engine: what arrived is not what is served, or what is served is computed with otherwise.

Each is planted in the real parts, and the first sync with it is refused; docs/traps.md says who paid for which.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_engines import CountsOn, KeepsPrefixes, PackedHead, ReachesOne
from torch import Tensor
from trap_rig import (
    LAYER,
    LORA,
    STAGED,
    Rig,
    arriving,
    leaving,
    llama,
    make_engine,
    make_group,
    make_trainer,
    saying,
)

from tandem.engine.hf import staged_weights
from tandem.engine.hf.lora_hooks import HookedAdapter
from tandem.engine.pool import EnginePool
from tandem.errors import EngineError, LogprobGap, SyncError, SyncTimeout
from tandem.model import served_weights
from tandem.ops.named_tensors import live_tensors
from tandem.spec.model import LoraSpec
from tandem.types import Completion, Served, Span

Q = f"{LAYER}q_proj.weight"
ADAPTERS = ("adapter", "adapter_broadcast")
SCALE = LORA.alpha / LORA.rank
ANOTHER_MODEL = "equal weights, and yet another model is computed"
pytestmark = pytest.mark.usefixtures("one_thread")


def plant_and_refuse(rig: Rig, plant: Callable[[Rig], None], kind: type[Exception], *words: str) -> None:
    async def scenario() -> None:
        await rig.begin()
        plant(rig)
        await rig.refused(kind, *words)

    rig.play(scenario)


def plant_and_keep(rig: Rig, plant: Callable[[Rig], None], kind: type[Exception], *words: str) -> None:
    """As above, and the version before is served as if nothing had been."""

    async def scenario() -> None:
        await rig.begin()
        plant(rig)
        await rig.refused(kind, *words)
        await rig.serves_the_proven_one()

    rig.play(scenario)


# --- loaded, and not served


@pytest.mark.parametrize("mode", ["disk", "broadcast"])
def test_an_update_of_half_the_tensors_is_taken_back(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(rig: Rig) -> None:
        def first_eight(module: Any) -> Iterator[tuple[str, Tensor]]:
            """The others are aliases: what is pointed elsewhere is not what the module computes with."""
            for number, (name, tensor) in enumerate(live_tensors(module)):
                yield name, tensor if number < 8 else tensor.detach()

        monkeypatch.setattr(staged_weights, "live_tensors", first_eight)

    rig = Rig(mode, tmp_path)
    words = ("would be served from other memory than was verified", "the previous version stays in service")
    plant_and_keep(rig, half, SyncError, *words)


@pytest.mark.parametrize("mode", STAGED)
def test_a_version_that_was_received_and_never_put_in_place_is_refused(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(rig: Rig) -> None:
        def aliases(module: Any) -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.detach()) for name, tensor in live_tensors(module))

        monkeypatch.setattr(staged_weights, "live_tensors", aliases)
        monkeypatch.setattr(HookedAdapter, "use", lambda adapter, tensors: None)

    plant_and_keep(Rig(mode, tmp_path), never, SyncError, "would be served from other memory than was verified")


def test_an_engine_that_only_counts_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, engine=make_engine(llama(), CountsOn))
    plant_and_refuse(rig, lambda rig: None, SyncError, "the engine serves another", "than was sent")


def test_a_counter_that_advances_though_old_weights_are_sent_is_refused(tmp_path: Path) -> None:
    """Both ends agree, about weights that the trainer does not have any more."""

    def stale(rig: Rig) -> None:
        old = {name: tensor.clone() for name, tensor in rig.trainer.export("full").tensors()}
        leaving(rig, lambda tensors: old)

    plant_and_refuse(Rig("broadcast", tmp_path), stale, LogprobGap, ANOTHER_MODEL)


def test_a_version_that_was_never_sent_is_waited_for_no_longer_than_the_deadline(tmp_path: Path) -> None:
    def silent(rig: Rig) -> None:
        right = rig.bridge.send
        rig.bridge.send = lambda weights: right(replace(weights, version=1))  # type: ignore[method-assign]

    plant_and_keep(Rig("disk", tmp_path, deadline_s=1.0), silent, SyncTimeout, "version 2")


def test_a_receiver_that_never_comes_ends_the_send_by_its_deadline(tmp_path: Path) -> None:
    def deaf(rig: Rig) -> None:
        def receive(version: int, rank: int = 0) -> Any:
            time.sleep(1.5)
            raise SyncError("it was stuck elsewhere")

        rig.source.receive = receive

    plant_and_keep(Rig("broadcast", tmp_path, deadline_s=1.0), deaf, SyncTimeout, "version 2")


def test_an_answer_under_another_version_s_name_is_refused(tmp_path: Path) -> None:
    def misname(rig: Rig) -> None:
        right = rig.engine.generate

        async def generate(*args: Any, **kwargs: Any) -> Completion:
            answer = await right(*args, **kwargs)
            return replace(answer, spans=[Span(span.version - 1, span.count) for span in answer.spans])

        rig.engine.generate = generate

    plant_and_refuse(Rig("disk", tmp_path), misname, SyncError, "version 2 is loaded, and the engine answers with [1]")


# --- keys and values of older weights


@pytest.mark.parametrize("mode", ["disk", "adapter", "inproc"])
def test_an_engine_that_does_not_forget_is_refused(mode: str, tmp_path: Path) -> None:
    def remembering(rig: Rig) -> None:
        forget = rig.engine.load

        async def load(version: int) -> Served:
            epoch = rig.engine.cache_epoch
            served = await forget(version)
            rig.engine.cache_epoch = epoch
            return replace(served, cache_epoch=epoch)

        rig.engine.load = load

    words = ("the engine's cache epoch is still 2", "older weights may be in use")
    plant_and_refuse(Rig(mode, tmp_path), remembering, SyncError, *words)


@pytest.mark.parametrize("mode", [*STAGED, "shared"])
def test_a_prefix_cached_under_older_weights_is_noticed_by_the_canary(mode: str, tmp_path: Path) -> None:
    rig = Rig(mode, tmp_path, engine=make_engine(llama(), KeepsPrefixes))

    async def scenario() -> None:
        await rig.publish()
        await rig.refused(LogprobGap, "keys and values of older weights are in use")

    rig.play(scenario)


# --- equal weights, another computation


def test_a_packed_copy_of_the_tied_head_that_stays_old_is_noticed_by_the_canary(tmp_path: Path) -> None:
    def pack(rig: Rig) -> None:
        head = rig.served.get_output_embeddings()
        packed = PackedHead(head.weight)
        head.register_forward_hook(lambda _, inputs, output: packed(inputs[0]))

    plant_and_refuse(Rig("disk", tmp_path), pack, LogprobGap, ANOTHER_MODEL)


@pytest.mark.parametrize(("setting", "value"), [("rms_norm_eps", 1e-1), ("hidden_act", "gelu")])
def test_another_model_of_the_same_tensors_is_refused_when_it_is_met(setting: str, value: Any, tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, theirs=llama(**{setting: value}))

    async def scenario() -> None:
        for _ in range(2):  # and asking again does not make it right
            with pytest.raises(LogprobGap, match=rf"limit is 0\.0100: {ANOTHER_MODEL}"):
                await rig.publish()
        with pytest.raises(SyncError, match="nothing proves"):
            rig.publisher.check([make_group(0, 0)])

    rig.play(scenario)


def test_other_heads_in_tensors_of_the_same_shape_are_refused_for_their_rotary_table(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, theirs=llama(num_attention_heads=4, num_key_value_heads=4))

    async def scenario() -> None:
        await rig.refused(SyncError, "'model.rotary_emb.inv_freq' is [8] and is served as [4]")

    rig.play(scenario)


@pytest.mark.parametrize("mode", ["disk", "adapter"])
def test_weights_that_sleep_dropped_are_noticed_by_the_canary(mode: str, tmp_path: Path) -> None:
    """Level 2: after waking, memory is there again and nothing is in it."""

    def forgetful(rig: Rig) -> None:
        right = rig.engine.wake

        async def wake() -> None:
            with torch.no_grad():
                for tensor in rig.served.parameters():
                    tensor.zero_()
            await right()

        rig.engine.wake = wake

    plant_and_refuse(Rig(mode, tmp_path), forgetful, LogprobGap, ANOTHER_MODEL)


# --- adapters


def added(rig: Rig, factor: float) -> None:
    """Every linear layer adds `factor` times what its adapter adds."""

    def again(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        plain = torch.nn.functional.linear(inputs[0], layer.weight, layer.bias)
        return plain + factor * (output - plain)

    for layer in rig.served.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(again)


def not_added(rig: Rig) -> None:
    added(rig, 0.0)


def scaled_again(rig: Rig) -> None:
    """As an engine does that multiplies by alpha / r what was multiplied already, or adds it twice: both are 2."""
    added(rig, SCALE)


def not_scaled(rig: Rig) -> None:
    leaving(rig, lambda tensors: {name: each / SCALE if ".lora_B." in name else each for name, each in tensors.items()})


def zero(rig: Rig) -> None:
    leaving(rig, lambda tensors: {name: each * (".lora_A." in name) for name, each in tensors.items()})


@pytest.mark.parametrize("mode", ADAPTERS)
@pytest.mark.parametrize("plant", [not_added, scaled_again, not_scaled, zero])
def test_an_adapter_that_is_not_applied_as_trained_is_noticed_by_the_canary(
    plant: Any, mode: str, tmp_path: Path
) -> None:
    plant_and_refuse(Rig(mode, tmp_path), plant, LogprobGap, ANOTHER_MODEL)


def one_matrix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if not name.endswith(f"{LAYER}q_proj.lora_B.weight")}


def of_no_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.1.", "layers.7."): each for name, each in tensors.items()}


def of_a_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.1.self_attn.q_proj", "norm"): each for name, each in tensors.items()}


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): each for name, each in tensors.items()}


def of_smaller_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each[:2] if ".lora_A." in name else each[:, :2] for name, each in tensors.items()}


def empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


NO_ADAPTERS = {
    one_matrix: "q_proj' has only one of its two matrices",
    of_no_layer: "adapt no layer that the engine serves",
    of_a_norm: "'base_model.model.model.norm' names no linear layer of this model",
    without_prefix: "adapt no layer that the engine serves",
    of_smaller_rank: "rank 4 needs",
    empty: "the adapter that arrived is empty: only the base would be served",
}


@pytest.mark.parametrize("mode", ADAPTERS)
@pytest.mark.parametrize("change", NO_ADAPTERS, ids=lambda change: change.__name__)
def test_an_adapter_that_does_not_fit_is_refused_and_the_one_before_stays(
    change: Any, mode: str, tmp_path: Path
) -> None:
    plant_and_keep(Rig(mode, tmp_path), lambda rig: leaving(rig, change), SyncError, NO_ADAPTERS[change])


def test_an_adapter_that_is_lost_or_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each / 2 if name.endswith("q_proj.lora_B.weight") else each for name, each in tensors.items()}

    plant_and_keep(
        Rig("adapter", tmp_path), lambda rig: arriving(rig, halve), SyncError, "q_proj.lora_B.weight' is not"
    )


@pytest.mark.parametrize("mode", ADAPTERS)
@pytest.mark.parametrize("theirs", ["another rope theta", "one other weight"])
def test_an_adapter_is_not_put_on_another_base(theirs: str, mode: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    module = llama(rope_parameters=rope) if theirs == "another rope theta" else llama()
    name = "model.rotary_emb.inv_freq"
    if theirs == "one other weight":
        name = Q
        module.get_parameter(Q).data[0, 0] += 1e-6
    rig = Rig(mode, tmp_path, theirs=module)

    async def scenario() -> None:
        words = (f"'{name}' differs", "is not the trainer's", "load the same model, in the same precision")
        await rig.refused(SyncError, *words)
        assert rig.engine.version == -1

    rig.play(scenario)


def test_an_adapter_of_an_earlier_trainer_does_not_stay_on_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Rig("adapter", tmp_path)
    second = Rig("broadcast", tmp_path, engine=first.engine)
    second.trainer = make_trainer(second.module, LoraSpec(rank=2))  # merged as it is sent

    async def scenario() -> None:
        await first.begin()
        await second.begin()
        await second.serves_the_proven_one()
        right, stays = HookedAdapter.use, first.trainer.export("adapter")
        monkeypatch.setattr(HookedAdapter, "use", lambda adapter, tensors: right(adapter, dict(stays.tensors())))
        await second.refused(LogprobGap, ANOTHER_MODEL)

    second.play(scenario)
    first.bridge.close()


def test_the_base_in_place_of_the_merged_weights_is_noticed_by_the_canary(tmp_path: Path) -> None:
    """Every rollout of the model before training: names, shapes and digests are as they should be."""
    rig = Rig("broadcast", tmp_path)
    rig.trainer = make_trainer(rig.module, LORA)
    plant_and_refuse(
        rig, lambda rig: leaving(rig, lambda _: dict(served_weights.base(rig.module))), LogprobGap, ANOTHER_MODEL
    )


# --- memory


@pytest.mark.parametrize("mode", ["broadcast", "adapter_broadcast", "adapter_broadcast by memory"])
def test_a_version_that_arrives_does_not_change_the_one_that_is_served_or_staged(mode: str, tmp_path: Path) -> None:
    """As many as there may be at a time; none is in memory that another one lies in."""
    rig = Rig(mode, tmp_path)
    held: list[tuple[Any, dict[str, Tensor]]] = []

    async def scenario() -> None:
        await rig.begin()
        source = rig.source
        right = source.receive

        def receive(version: int, rank: int = 0) -> Any:
            weights = right(version, rank)
            held.append((weights, {name: tensor.clone() for name, tensor in weights.tensors()}))
            return weights

        source.receive = receive
        for _ in range(3):
            rig.step()
            await rig.publish()
            await rig.serves_the_proven_one()

    rig.play(scenario)
    assert len(held) == 3
    for weights, then in held:
        assert all(torch.equal(tensor, then[name]) for name, tensor in weights.tensors())


@pytest.mark.parametrize("mode", ["broadcast", "adapter_broadcast"])
def test_a_receive_buffer_that_is_used_again_is_refused(mode: str, tmp_path: Path) -> None:
    def reuse(rig: Rig) -> None:
        source = rig.source
        right = source.receive
        buffer: dict[str, Tensor] = {}

        def receive(version: int, rank: int = 0) -> Any:
            weights = right(version, rank)
            for name, tensor in weights.tensors():
                buffer.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            return replace(weights, tensors=lambda: iter(buffer.items()))

        source.receive = receive

    rig = Rig(mode, tmp_path)

    async def scenario() -> None:
        await rig.publish()
        reuse(rig)
        rig.step()
        await rig.publish()
        await rig.refused(SyncError, "arrived in the memory that is served", "needs its own memory")

    rig.play(scenario)


def test_an_engine_on_a_copy_of_the_trainer_s_module_is_refused(tmp_path: Path) -> None:
    module = llama()
    rig = Rig("inproc", tmp_path, ours=module, theirs=copy.deepcopy(module))

    async def scenario() -> None:
        await rig.refused(SyncError, "single copy", "is not the trainer's memory")

    rig.play(scenario)


@pytest.mark.parametrize("mode", ["shared", "inproc"])
def test_a_tensor_that_left_the_single_copy_is_refused(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine packs or moves a weight, as one that is compiled or quantised may."""

    def move(rig: Rig) -> None:
        if mode == "inproc":  # one module: what moves for the engine alone is in its own list
            moved = dict(live_tensors(rig.module)) | {Q: rig.module.get_parameter(Q).data.clone()}
            monkeypatch.setattr(staged_weights, "live_tensors", lambda module: moved.items())
            return
        tensor = rig.served.get_parameter(Q)
        tensor.data = tensor.data.clone()

    plant_and_refuse(Rig(mode, tmp_path), move, SyncError, "single copy", "it would serve old weights")


def test_a_trainer_s_tensor_that_left_the_single_copy_is_refused(tmp_path: Path) -> None:
    def move(rig: Rig) -> None:
        tensor = rig.module.get_parameter(Q)
        tensor.data = tensor.data.clone()

    words = (f"not in the engine's memory, as '{Q}'", "would never be served")
    plant_and_refuse(Rig("shared", tmp_path, deadline_s=1.0), move, SyncError, *words)


@pytest.mark.parametrize("mode", ["shared", "inproc"])
def test_weights_that_are_not_finite_in_the_single_copy_answer_nothing(mode: str, tmp_path: Path) -> None:
    """Nothing is sent that could be looked at. The canary is the first to ask."""
    rig = Rig(mode, tmp_path)

    def spoil(rig: Rig) -> None:
        step = rig.step

        def spoiled() -> None:
            step()
            with torch.no_grad():
                rig.module.model.norm.weight[0] = float("nan")

        rig.step = spoiled  # type: ignore[method-assign]

    plant_and_refuse(rig, spoil, EngineError, "not finite (version 2)")


# --- a pool


def test_a_load_that_reaches_one_replica_only_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, engine=ReachesOne([make_engine(llama()), make_engine(llama())]))

    async def scenario() -> None:
        await rig.publish()
        rig.step()
        await rig.publish()
        await rig.refused(SyncError, "the engine proves 2 and serves 1")

    rig.play(scenario)


def test_a_replica_that_only_counts_is_refused(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path, engine=EnginePool([make_engine(llama()), make_engine(llama(), CountsOn)]))

    async def scenario() -> None:
        await rig.publish()
        rig.step()
        await rig.publish()
        await rig.refused(SyncError, "asked for version 2, and the engines hold different weights")

    rig.play(scenario)


def test_the_engine_s_word_for_another_version_is_refused(tmp_path: Path) -> None:
    def misreport(rig: Rig) -> None:
        saying(rig, lambda served: replace(served, version=served.version - 1))

    plant_and_refuse(Rig("disk", tmp_path), misreport, SyncError, "sent version 2, the engine proves 1 and serves 2")
