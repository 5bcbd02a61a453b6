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
from typing import Any, NamedTuple, cast

import family_images
import torch
import transformers
from torch import Tensor

from tandem.build import run_engines, training
from tandem.build.training import BuiltModel
from tandem.errors import SpecError
from tandem.io.image_store import ImageStore
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Engine, Trainer
from tandem.recipes import sync_bench
from tandem.spec.bridges import BRIDGES
from tandem.spec.load import with_values
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.spec.run import RlSpec
from tandem.spec.train import RlStage, SftStage
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.logprob_gap import CalibratedLimit
from tandem.types import Completion, MicroBatch, Sampling, Trajectory

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()
NEAR = 1e-5
"""Largest difference of two computations of one logprob in float32."""
PROMPT = TOKENIZER.encode("<|user|>sort waltz, and tell me how it is done, step by step<|end|><|assistant|>")
_STAGE = SftStage(steps=1, lr=1e-2)
SPOKEN = [TOKENIZER.encode(text) for text in ("altwz<|end|>", "a, then l, then t<|end|>", "no<|end|>")]

_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 256,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Family(NamedTuple):
    models: str
    config: str
    """The name of the config's class in transformers."""
    sizes: dict[str, Any] = {}  # noqa: RUF012 - a named tuple's default is never changed
    attention: str = "sdpa"
    """The attention of plain transformers; "eager" where it has no other."""
    sees: bool = False


FAMILIES: dict[str, Family] = {
    "Llama": Family("Llama 2 to 3.3, SmolLM 1 and 2", "LlamaConfig"),
    "SmolLM3": Family("SmolLM3", "SmolLM3Config"),
    "Mistral": Family("Mistral, Ministral", "MistralConfig", {"sliding_window": 24}),
    "Qwen2": Family("Qwen 2 and 2.5", "Qwen2Config", {"hidden_size": 128}),
    "Qwen3": Family("Qwen 3", "Qwen3Config"),
    "Qwen3-MoE": Family("Qwen 3 MoE", "Qwen3MoeConfig", _EXPERTS),
    "Qwen3-Next": Family("Qwen 3 Next", "Qwen3NextConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3.5": Family("Qwen 3.5, text", "Qwen3_5TextConfig"),
    "Qwen3.5-MoE": Family(
        "Qwen 3.5 MoE, text", "Qwen3_5MoeTextConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "Mixtral": Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma": Family("Gemma 1", "GemmaConfig"),
    "Gemma2": Family("Gemma 2", "Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 32}, "eager"),
    "Gemma3": Family(
        "Gemma 3, text",
        "Gemma3TextConfig",
        {
            "sliding_window": 24, "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "Phi3": Family("Phi 3 and 4", "Phi3Config"),
    "OLMo2": Family("OLMo 2", "Olmo2Config"),
    "OLMo3": Family("OLMo 3", "Olmo3Config", {"sliding_window": 24}),
    "Gemma4": Family(
        "Gemma 4, text",
        "Gemma4TextConfig",
        {
            "sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": len(TOKENIZER),
        },
    ),
    "GLM4": Family("GLM 4", "Glm4Config"),
    "Cohere2": Family("Command R7B", "Cohere2Config", {"sliding_window": 24}),
    # Published checkpoints name these widths once more, where vLLM reads them.
    "LFM2": Family(
        "LFM 2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "hidden_size": 128, "conv_dim": 128, "block_dim": 128},
    ),
    "Granite 4": Family(
        "Granite 4, hybrid",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16,
            "hidden_size": 128, "num_local_experts": 0, "shared_intermediate_size": 64,
        },
    ),
    "Jamba": Family(
        "Jamba",
        "JambaConfig",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "hidden_size": 128,
        },
    ),
    "Falcon-H1": Family(
        "Falcon H1",
        "FalconH1Config",
        {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    ),
    "OLMo hybrid": Family("OLMo hybrid", "OlmoHybridConfig"),
    "Llama 4": Family(
        "Llama 4, text",
        "Llama4TextConfig",
        {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 24},
    ),
    "Granite": Family("Granite 3", "GraniteConfig"),
    "gpt-oss": Family(
        "gpt-oss", "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}, "eager"
    ),
    "DeepSeek-V3": Family(
        "DeepSeek V3 and R1 (MLA)",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 512,
            "head_dim": 64, "qk_rope_head_dim": 64,  # vLLM's CPU build computes 512 and 64 alone, and YaRN's table
            "qk_nope_head_dim": 8, "v_head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
            },
        },
    ),
    "Qwen3-VL": Family("Qwen 3 VL, dense", "Qwen3VLConfig", {"head_dim": 16}, sees=True),  # as many as its axes fill
}  # fmt: skip


class Different(Exception):
    """Two computations of the same thing differ: a bug."""


class Bench:
    """One family's model on the disk, and what is made of it."""

    def __init__(self, family: Family, place: Path) -> None:
        self.family, self.place = family, place
        self.path = place / "model"
        options = {**_SIZES, **family.sizes}
        options = family_images.seeing_sizes(options) if family.sees else options
        config = getattr(transformers, family.config)(**options)
        torch.manual_seed(0)
        module: Any = self._loader.from_config(config, attn_implementation=family.attention)
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                # Otherwise 1 or 0, so that a mistake hides.
                if "norm" in name or name.endswith((".bias", "sinks", "correction_bias")):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        module.save_pretrained(self.path)
        (family_images.TOKENIZER if family.sees else TOKENIZER).save_pretrained(self.path)
        if family.sees:
            family_images.write_processor(self.path)

    @property
    def _loader(self) -> Any:
        return transformers.AutoModelForImageTextToText if self.family.sees else transformers.AutoModelForCausalLM

    def built(
        self, lora: LoraSpec | None = None, path: Path | None = None, precision: PrecisionSpec | None = None
    ) -> BuiltModel:
        spec = PathModel(path=str(path or self.path), lora=lora)
        return training.model(spec, precision or Float32Precision(), 0, CPU, images=self.place / "images")

    def plain(self, path: Path | None = None) -> Any:
        """The model as transformers alone loads it."""
        return self._loader.from_pretrained(
            path or self.path, dtype=torch.float32, attn_implementation=self.family.attention
        ).eval()


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
        # float32 rounds the gradient of a gated delta net's decay more coarsely: in Qwen3.5 packed and single sequences
        # differ by 1.4e-5, and by 4e-14 where all is computed in float64.
        most = 10 * NEAR if ".linear_attn." in name else NEAR
        if not (packed[name] - single[name]).norm() <= most * (1 + single[name].norm()):
            raise Different(f"the gradient of {name} differs between packed and single sequences")


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
    """Return "yes", TEXT_ONLY, or the sentence of the refusal. Everything else is raised: a bridge that fails, too."""
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
