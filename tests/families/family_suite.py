"""One suite over model families: each cell of docs/families.md is one check of one family, at a tiny size.

A cell holds, or Tandem refuses it by a sentence; anything else is a bug. `python docs/make_families.py` writes the
table from this suite. test_families.py runs it again, and compares.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import family_images
import torch
from family_models import CPU, FAMILIES, TOKENIZER, Bench
from torch import Tensor

from tandem.build import run_engines, training
from tandem.build.built_model import BuiltModel
from tandem.errors import SpecError
from tandem.io.image_store import ImageStore
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Engine, Trainer
from tandem.recipes import sync_bench
from tandem.spec.bridges import BRIDGES
from tandem.spec.load import with_values
from tandem.spec.model import LoraSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.run import RlSpec
from tandem.spec.train import RlStage, SftStage
from tandem.train.batch_packing import make_batch
from tandem.train.logprob_gap import CalibratedLimit
from tandem.types import Completion, MicroBatch, Sampling, Trajectory

NEAR = 1e-5
"""Largest difference of two computations of one logprob in float32."""
_OF_DECAY = ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_ba.weight", ".a_proj.weight")
PROMPT = TOKENIZER.encode("<|user|>sort waltz, and tell me how it is done, step by step<|end|><|assistant|>")
_STAGE = SftStage(steps=1, lr=1e-2)
SPOKEN = [TOKENIZER.encode(text) for text in ("altwz<|end|>", "a, then l, then t<|end|>", "no<|end|>")]


class Different(Exception):
    """Two computations of the same thing differ: a bug."""


def rows(prompt: Sequence[int] = PROMPT) -> list[Trajectory]:
    """Siblings: recorded answers to one prompt."""
    return [
        Trajectory(
            ids=[*prompt, *spoken],
            trained=[False] * len(prompt) + [True] * len(spoken),
            logprobs=[0.0] * (len(prompt) + len(spoken)),
            versions=[-1] * (len(prompt) + len(spoken)),
        )
        for spoken in SPOKEN
    ]


def unlike() -> list[Trajectory]:
    """Rows of which two fit into the place of the longest."""
    return [rows()[0], *rows(PROMPT[35:])[1:]]


def scores(model: BuiltModel, groups: list[list[Trajectory]], shares: Any = shares_never) -> list[Tensor]:
    """The trainer's logprobs of each micro-batch."""
    return [model.policy.score(micro, 1.0) for micro in batch_of(groups, shares)]


def batch_of(groups: list[list[Trajectory]], shares: Any) -> list[MicroBatch]:
    return make_batch(
        groups, training.sft_algorithm(), micro_tokens=4096, version=0, shares=shares, device=CPU
    ).micro  # fmt: skip


def alone(model: BuiltModel) -> Tensor:
    """The trainer's logprobs of each answer, one sequence at a time, in the order of `rows`."""
    return torch.cat([scores(model, [[row]])[0] for row in rows()])


def by_transformers(module: Any) -> Tensor:
    found: list[Tensor] = []
    with torch.no_grad():
        for row in rows():
            ids = torch.tensor([row.ids])
            logprobs = module(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0])
    return torch.cat(found)


def near(ours: Tensor, theirs: Tensor, most: float = NEAR) -> None:
    # Sorted, because packing puts the longest sequence first.
    if ours.shape != theirs.shape:
        raise Different(f"{list(ours.shape)} numbers where {list(theirs.shape)} belong")
    gap = float((ours.sort()[0] - theirs.sort()[0]).abs().max())
    if not gap <= most:
        raise Different(f"logprobs differ by {gap:.2g}")


def same_gradient(model: BuiltModel, given: Sequence[Trajectory]) -> None:
    """Require of a packed batch the gradient of its sequences one by one."""
    gradients: list[dict[str, Tensor]] = []
    for groups in ([[[row] for row in given]], [[[row]] for row in given]):
        model.policy.module.zero_grad()
        for each in groups:
            (micro,) = batch_of(each, shares_never)
            model.policy.logprobs(micro, 1.0).logprobs_N.sum().backward()
        gradients.append(
            {name: tensor.grad.clone() for name, tensor in model.policy.trainable() if tensor.grad is not None}
        )
    packed, single = gradients
    for name in single:
        # float32 rounds the gradient of a gated delta net's decay more coarsely: a few numbers of packed and single
        # sequences differ by up to 2.3e-5, and in Qwen3.5 by 4e-14 where all is computed in float64.
        most = 10 * NEAR if ".linear_attn." in name and name.endswith(_OF_DECAY) else NEAR
        if not (packed[name] - single[name]).norm() <= most * (1 + single[name].norm()):
            raise Different(f"the gradient of {name} differs between packed and single sequences")
    apart = torch.stack([(packed[name] - single[name]).norm() for name in single]).norm()
    if not apart <= NEAR * torch.stack([each.norm() for each in single.values()]).norm():
        raise Different("the gradient differs between packed and single sequences")


def sft_trainer(model: BuiltModel) -> Trainer:
    return training.trainer(_STAGE, model, training.sft_algorithm(), 0, 0)


def step(model: BuiltModel, trainer: Trainer | None = None, given: Sequence[Trajectory] = ()) -> None:
    """Train one step on the recordings. Every part that should move must have a gradient."""
    trainer = trainer or sft_trainer(model)
    before = {name: tensor.detach().clone() for name, tensor in model.policy.trainable()}
    batch = training.batches(_STAGE, model, training.sft_algorithm())([[*(given or rows())]], 0)
    if not trainer.step(batch)["grad/norm"] > 0:
        raise Different("the gradient is 0")
    if all(torch.equal(before[name], tensor) for name, tensor in model.policy.trainable()):
        raise Different("the step changed nothing")


# --- engines


def run_of(bench: Bench, bridge: str, lora: LoraSpec | None = None, kind: str = "server") -> RlSpec:
    """Return the spec of a run over this bridge. `kind`: of the engine, where it is in another process."""
    spec = sync_bench.bench_spec(bridge, "tiny", "cpu", kind, bench.place)
    model = {"path": str(bench.path), **({"lora": lora.model_dump(mode="json")} if lora else {})}
    return cast("RlSpec", with_values(spec, {"model": model}))


def answers(bench: Bench, spec: RlSpec, precision: PrecisionSpec | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the engine's and the trainer's logprobs of each answer that the engine of this run samples, after a step.
    Trainer, engine and bridge are those of a run."""
    model = bench.built(spec.model.lora, precision=precision)
    found: list[tuple[Tensor, Tensor]] = []
    for told, prompt in asyncio.run(_published_and_asked(bench, spec, model)):
        count = len(told.ids)
        row = Trajectory(
            ids=[*prompt, *told.ids],
            trained=[False] * len(prompt) + [True] * count,
            logprobs=[0.0] * (len(prompt) + count),
            versions=[-1] * (len(prompt) + count),
        )
        found.append((torch.tensor(told.logprobs), scores(model, [[row]])[0]))
    return found


async def _published_and_asked(bench: Bench, spec: RlSpec, model: BuiltModel) -> list[tuple[Completion, list[int]]]:
    """Publish the model as it was loaded, and after a step."""
    joined = run_engines.join(spec, model, Path(tempfile.mkdtemp(dir=bench.place)))
    call = training.caller(spec.sync.traits.in_process)
    publisher, trainer = run_engines.publisher(joined, model, spec.sync.deadline_s, call), sft_trainer(model)
    try:
        await publisher.publish(trainer)
        async with publisher.resting(trainer):
            step(model, trainer)
        await publisher.publish(trainer)
        return await asked(joined.engine, trainer)
    finally:
        await joined.engine.close()
        joined.bridge.close()


async def asked(engine: Engine, trainer: Trainer) -> list[tuple[Completion, list[int]]]:
    """Return what the engine samples, with the prompts. It must be of the trainer's version."""
    prompts = [PROMPT, PROMPT[:9], [*PROMPT, *SPOKEN[1], *PROMPT]]  # of different lengths: they are batched
    sampling = Sampling(max_tokens=16, temperature=1.0)
    told = await asyncio.gather(
        *(engine.generate(ids, replace(sampling, seed=number)) for number, ids in enumerate(prompts))
    )
    if odd := {version for each in told for version in each.versions} - {trainer.version}:
        raise Different(f"tokens of version {odd} where {trainer.version} was published")
    return list(zip(told, prompts, strict=True))


def served(bench: Bench, bridge: str, lora: LoraSpec | None = None) -> None:
    """Require of the engine the trainer's logprobs of what it sampled, within 1e-4."""
    for of_engine, of_trainer in answers(bench, run_of(bench, bridge, lora)):
        near(of_engine, of_trainer, 10 * NEAR)


# --- the cells


def trainer(bench: Bench) -> None:
    near(alone(bench.built()), by_transformers(bench.plain()))


def packing(bench: Bench) -> None:
    model = bench.built()
    (micro,) = batch_of([[row] for row in unlike()], shares_never)
    if not micro.segments_BT.max() > 0:
        raise Different("no row has two sequences")
    single = torch.cat([scores(model, [[row]])[0] for row in unlike()])
    near(model.policy.score(micro, 1.0), single)


def trees(bench: Bench) -> None:
    model = bench.built()
    (tree,) = scores(model, [rows()], lambda apart, tree: True)
    near(tree, alone(model))


def sft(bench: Bench) -> None:
    """The gradient of a packed batch is that of its sequences one by one; and a step of all weights."""
    model = bench.built()
    same_gradient(model, unlike())
    step(model)


def sft_lora(bench: Bench) -> None:
    step(bench.built(LoraSpec(rank=4)))


def bf16(bench: Bench) -> None:
    """The gap of a batch, in bfloat16, is within the least limit that a run calibrates."""
    precision = Bfloat16Precision()
    stage = RlStage(steps=1, lr=1e-2, groups_per_step=1, group_size=2)
    limit = training.gap_limit(stage, bench.built(precision=precision))
    assert isinstance(limit, CalibratedLimit)
    gaps = [(ours - theirs).abs() for ours, theirs in answers(bench, run_of(bench, "inproc"), precision)]
    gap = float(torch.cat(gaps).mean())
    if not gap <= limit.floor:
        raise Different(f"logprobs differ by {gap:.2g} nats a token; a run's limit is {limit.floor:g} ({limit.why})")


def quantized(bench: Bench) -> None:
    for base in ("int8", "nf4"):
        served(bench, "inproc", LoraSpec(rank=4, base=base))


def over(bridge: str) -> Callable[[Bench], None]:
    """Return the check of a bridge."""
    return lambda bench: served(bench, bridge, LoraSpec(rank=4) if BRIDGES[bridge].carries == "adapter" else None)


def export(bench: Bench) -> None:
    for number, spec in enumerate((None, LoraSpec(rank=4))):
        model = bench.built(spec)
        step(model)
        place = bench.place / f"export-{number}"
        training.export(model, place)
        ours = alone(model)
        near(ours, by_transformers(bench.plain(place)))
        near(ours, alone(bench.built(path=place)))


def ranks(bench: Bench) -> None:
    from tandem.model.load_rows import opened_model
    from tandem.ops.parts import box_of_rank

    module = bench.plain()
    with opened_model(str(bench.path), "main", "sdpa") as (skeleton, rows_of):
        for (name, parameter), whole in zip(skeleton.named_parameters(), module.parameters(), strict=True):
            if not torch.equal(rows_of(parameter, box_of_rank(parameter.shape, 0, 1)), whole):
                raise Different(f"the rows of {name} are not the weight's")


TEXT_ONLY = "text only"


def seen(model: BuiltModel, store: ImageStore) -> list[Trajectory]:
    """Return siblings: two that differ in their second image's pixels alone, one with the first image alone; then one
    of text, and one that has said an image's token itself."""
    source = model.policy.vision.images
    first = store.put(family_images.drawn(40, 56))
    second, other = (store.put(family_images.drawn(33, 90, seed)) for seed in (1, 2))
    opening, question = "<|user|>compare ", " in a few words<|end|><|assistant|>"
    said = family_images.MARKS[2]
    return [
        family_images.shown(source, [opening, first, " and ", second, question], "rather red<|end|>"),
        family_images.shown(source, [opening, first, " and ", other, question], "rather red, or blue<|end|>"),
        family_images.shown(source, [opening, first, question], "no<|end|>"),
        family_images.shown(source, [opening, "nothing", question], f"why {said}{said}?<|end|>"),
    ]


def images(bench: Bench) -> str:
    """The checks of text, on rows with images; and the tower does not move."""
    if not bench.family.sees:
        return TEXT_ONLY
    for spec in (None, LoraSpec(rank=4)):
        model = bench.built(spec)
        source, given = model.policy.vision.images, seen(model, ImageStore(bench.place / "images"))
        tower = model.policy.module.model.visual
        before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
        alone = torch.cat([scores(model, [[row]])[0] for row in given])
        plain = bench.plain()
        near(alone[: -given[-1].num_trained], by_images(plain, given[:-1], source))  # it takes said tokens for places
        near(scores(model, [[row] for row in given])[0], alone)
        for siblings in (given[:2], given[1:3]):
            (tree,) = scores(model, [siblings], lambda apart, tree: True)
            near(tree, torch.cat([scores(model, [[row]])[0] for row in siblings]))
        same_gradient(model, given)
        step(model, given=given)
        if any(not torch.equal(before[name], now) for name, now in tower.state_dict().items()):
            raise Different("the vision tower has moved")
        place = bench.place / f"seeing-{'adapter' if spec else 'whole'}"
        training.export(model, place)
        now = torch.cat([scores(model, [[row]])[0] for row in given[:-1]])
        near(now, by_images(bench.plain(place), given[:-1], source))
        again = bench.built(path=place)
        near(now, torch.cat([scores(again, [[row]])[0] for row in given[:-1]]))
        first = given[0].images[0].digest
        if not torch.equal(again.policy.vision.images.pixels(first), source.pixels(first)):
            raise Different("the exported processor makes other pixels")
    return "yes"


def by_images(module: Any, given: Sequence[Trajectory], source: Any) -> Tensor:
    return torch.cat([family_images.transformers_logprobs(module, row, source) for row in given])


CELLS: dict[str, Callable[[Bench], str | None]] = {
    "trainer": trainer, "packing": packing, "prompt trees": trees, "SFT": sft, "SFT, LoRA": sft_lora,
    "all weights, inproc": over("inproc"), "bf16, inproc": bf16,
    "LoRA, inproc": lambda bench: served(bench, "inproc", LoraSpec(rank=4)), "int8, nf4": quantized,
    **{name: over(name) for name, traits in BRIDGES.items() if not traits.in_process},
    "export": export, "ranks": ranks, "images": images,
}  # fmt: skip
"""Each bridge to an engine in another process has the column of its name."""


def outcome(cell: str, bench: Bench) -> str:
    """Return "yes", TEXT_ONLY, or the sentence of the refusal. Everything else is raised: a bridge that fails, too. A
    cell has the same numbers whatever cells came before."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return CELLS[cell](bench) or "yes"
        except SpecError as error:
            return re.sub(r"\{[^}]*\}", "{...}", str(error).replace(str(bench.path), "MODEL"))  # sets have no order


@cache
def outcomes(name: str) -> dict[str, str]:
    """Return every cell of a family."""
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(FAMILIES[name], Path(place))
        return {cell: outcome(cell, bench) for cell in CELLS}
