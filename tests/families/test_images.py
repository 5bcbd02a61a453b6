"""A model that sees learns from images, and what the trainer refuses or does beside it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import family_suite as suite
import pytest
import torch
from family_images import as_png, shown, transformers_answer
from family_models import CPU, FAMILIES, Bench
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import tandem
from tandem.build import built_model, training
from tandem.errors import ImageError, SpecError
from tandem.io.image_store import ImageStore
from tandem.ops.byte_sizes import shares_never
from tandem.recipes.model_check import check_model
from tandem.runs.planner.plan import plan_run
from tandem.runs.planner.plan_text import plan_text
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.parallel import ParallelSpec
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.spec.train import SftStage
from tandem.types import Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")
COLOURS = {
    "red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "yellow": (230, 220, 40),
    "black": (10, 10, 10), "white": (245, 245, 245), "purple": (140, 30, 170), "orange": (250, 140, 20),
}  # fmt: skip
QUESTION = ["<|user|>which colour is ", "?<|end|><|assistant|>"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(FAMILIES["Qwen3-VL"], tmp_path)


def test_sft_names_the_colours_of_images_and_cannot_without_them(bench: Bench):
    from PIL import Image

    model, store = bench.built(), ImageStore(bench.place / "images")
    source = model.policy.vision.images
    asked = {
        store.put(as_png(Image.new("RGB", size, colour))): name
        for name, colour in COLOURS.items()
        for size in ((32, 32), (48, 32))
    }
    assert len(asked) == 16
    rows = [shown(source, [QUESTION[0], digest, QUESTION[1]], f"{name}<|end|>") for digest, name in asked.items()]
    losses = taught(model, rows, 30)
    assert losses[-1] < 0.05 < 2 < losses[0]
    training.export(model, bench.place / "export")
    plain = bench.plain(bench.place / "export")
    assert {digest: transformers_answer(plain, row, source) for digest, row in zip(asked, rows, strict=True)} == asked
    blind = [shown(source, ["".join(QUESTION)], f"{name}<|end|>") for name in asked.values()]
    assert min(taught(bench.built(), blind, 30)) > 0.34  # ln 8 of 6 tokens: one of eight colours, which is a guess


def taught(model: built_model.BuiltModel, rows: list[Trajectory], steps: int) -> list[float]:
    stage = SftStage(steps=steps, lr=1e-2)
    trainer = training.trainer(stage, model, training.sft_algorithm(), 0, 0)
    make = training.batches(stage, model, training.sft_algorithm())
    return [trainer.step(make([[row] for row in rows], trainer.version))["loss/total"] for _ in range(steps)]


@pytest.mark.parametrize("activations", ["selective", "recompute"])
def test_recomputed_activations_give_the_same_gradient(bench: Bench, activations: str):
    found: list[dict[str, torch.Tensor]] = []
    for each in ("keep", activations):
        spec = PathModel.model_validate({"path": str(bench.path), "activations": each})
        model = built_model.model(spec, Float32Precision(), 0, CPU, images=bench.place / "images")
        (micro,) = suite.batch_of(
            [[row] for row in suite.seen(model, ImageStore(bench.place / "images"))], shares_never
        )
        model.policy.logprobs(micro, 1.0).logprobs_N.sum().backward()
        found.append({name: tensor.grad for name, tensor in model.policy.trainable() if tensor.grad is not None})
    kept, again = found
    assert kept.keys() == again.keys()
    assert all(torch.allclose(kept[name], again[name], rtol=1e-5, atol=1e-6) for name in kept)


def test_16_bit_weights_have_a_master_except_in_the_tower(bench: Bench):
    spec = PathModel(path=str(bench.path))
    model = built_model.model(spec, Bfloat16Precision(master="split"), 0, CPU, images=bench.place / "images")
    assert not [name for name in model.master.state() if "visual" in name]
    suite.step(model, given=suite.seen(model, ImageStore(bench.place / "images")))


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_the_reference_sees_the_images_too(bench: Bench, lora: LoraSpec | None):
    model = bench.built(lora)
    given = suite.seen(model, ImageStore(bench.place / "images"))
    (micro,) = suite.batch_of([[row] for row in given], shares_never)
    before = model.policy.score(micro, 1.0)
    model.policy.keep_reference()
    if lora is None:  # it has all but the tower, which is the policy's
        trained = sum(tensor.nbytes for _, tensor in model.policy.trainable())
        assert model.policy.reference_bytes() == trained
    suite.step(model, given=given)
    assert torch.equal(model.policy.reference_logprobs(micro, 1.0), before)
    assert not torch.allclose(model.policy.score(micro, 1.0), before, atol=1e-3)


def test_a_copy_of_a_checkpoint_has_the_processor(bench: Bench):
    model = bench.built()
    model.policy.deployer()(dict(model.policy.trainable()), bench.place / "deploy")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (bench.place / "deploy" / name).read_bytes() == (bench.path / name).read_bytes()
    assert bench.plain(bench.place / "deploy").model.visual.state_dict().keys()


def test_what_does_not_support_images_is_refused_by_name(bench: Bench):
    model = bench.built()
    rows = suite.seen(model, ImageStore(bench.place / "images"))
    (micro,) = suite.batch_of([rows[:1]], shares_never)
    model.policy.context_grad = False
    with pytest.raises(SpecError, match="context_grad = 'none' does not support images"):
        model.policy.logprobs(micro, 1.0)
    with pytest.raises(SpecError, match="distillation does not support models that see"):
        model.policy.follow(bench.plain())
    pairs = {"recipe": "preference", "data": {"kind": "file", "path": "rows.jsonl"}, "train": {"steps": 1, "lr": 1e-4}}
    for kind, said in (("kto", "'kto': does not support a model that sees"), ("reward_model", "choose another algor")):
        spec = parse_spec({**pairs, "model": {"path": str(bench.path)}, "algorithm": {"kind": kind}})
        with pytest.raises(SpecError, match=said):
            built_model.run_model(spec, None, bench.place / "images")
    train = {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2}
    of_run = {"recipe": "rl", "environment": {"name": "arithmetic"}, "train": train}
    rl = {**of_run, "model": {"path": str(bench.path)}}
    for beside, said in (
        ({"engine": {"kind": "server"}}, "engine.kind = 'server'"),
        ({"engine": {"kind": "vllm"}, "sync": {"bridge": "shared"}}, "sync.bridge = 'shared'"),
    ):
        with pytest.raises(SpecError, match=said):
            built_model.run_model(parse_spec({**rl, **beside}), None, bench.place / "images")
    beside = {"engine": {"kind": "server"}, "sync": {"bridge": "broadcast"}, "parallel": {"ranks": 2}}
    with pytest.raises(SpecError, match=r"(?s)set parallel.ranks = 1\n.*choose 'vllm', or 'hf' without \[sync\]"):
        tandem.run({**rl, **beside}, bench.place / "run")
    assert not (bench.place / "run").exists()  # refused before anything is loaded or started


def test_an_image_that_the_processor_refuses_is_named(bench: Bench):
    store, content = ImageStore(bench.place / "images"), io.BytesIO()
    Image.new("RGB", (4000, 2)).save(content, "PNG")
    images = bench.built().renderer.images
    assert images is not None
    with pytest.raises(ImageError, match="4000 x 2 pixels cannot be given to this model: "):
        images.length(store.put(content.getvalue()))


def test_a_model_check_says_that_it_sees(bench: Bench):
    check = check_model(str(bench.path))
    assert (check.findings, check.model["images"]) == ([], "sees images (tower frozen)")
    assert "set parallel.ranks = 1" in check.fits["parallel.ranks"]
    assert check.fits["engine server"] == "no, for it sees images"
    assert "shared" not in check.fits["engine vllm"]


TEXT = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SIZES = {
    "2B": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "8B": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
}
"""Of Qwen/Qwen3-VL-2B-Instruct and -8B-; what is not here is transformers' default."""


@pytest.mark.parametrize(("size", "total"), [("2B", 2_127_532_032), ("8B", 8_767_123_696), ("", 0)])
def test_a_plan_counts_the_model_and_its_frozen_tower(bench: Bench, size: str, total: int):
    path = bench.path
    if size:
        text, tower = SIZES[size]
        config = Qwen3VLConfig(
            text_config={**TEXT, **text}, vision_config={**tower, "out_hidden_size": text["hidden_size"]},
            tie_word_embeddings=size == "2B",
        )  # fmt: skip
        path = bench.place / size
        config.save_pretrained(path)
    with torch.device("meta"):
        module = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(path))
    module.tie_weights()
    all_numbers, frozen = (sum(each.numel() for each in part.parameters()) for part in (module, module.model.visual))
    assert all_numbers == (total or all_numbers)
    data = {"kind": "file", "path": str(bench.place / "rows.jsonl"), "eval_share": 0.0}
    spec = parse_spec({
        "recipe": "sft", "model": {"path": str(path), "compile": True, "attention": "packed"}, "data": data,
        "precision": {"weights": "bfloat16"}, "train": {"steps": 3, "lr": 1e-5, "batch_size": 2},
    })  # fmt: skip
    plan = plan_run(spec, gpu="h200", row_tokens=1024)
    assert (plan.parameters["total"], plan.parameters["vision tower"]) == (all_numbers, frozen)
    assert plan.parameters["trained"] == all_numbers - frozen
    train = next(phase for phase in plan.phases if phase.name == "train")
    assert train.parts["weights"] == 2 * all_numbers / 2**30
    assert train.parts["optimizer"] == 8 * (all_numbers - frozen) / 2**30
    assert train.parts["master"] == 2 * (all_numbers - frozen) / 2**30
    plain = spec.model_copy(update={"model": spec.model.model_copy(update={"compile": False})})
    assert plan.peak_gib == plan_run(plain, gpu="h200", row_tokens=1024).peak_gib  # its layers are not compiled
    assert train.parts["images"] == 0.5
    assert plan.work.lengths == "assumed"  # so that a run's images are no deviation from its plan


def test_a_plan_reads_the_text_of_rows_and_says_what_it_does_not_know_of_images(bench: Bench):
    store, rows = ImageStore(bench.place / "images"), bench.place / "rows.jsonl"
    image = bench.place / "images" / store.put(as_png(Image.new("RGB", (64, 64))))
    parts = [{"type": "image", "path": str(image)}, {"type": "text", "text": "which colour?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "black"}]}
    rows.write_text(4 * (json.dumps(row) + "\n"), encoding="utf-8")
    of_run = {"recipe": "sft", "model": {"path": str(bench.path)}, "train": {"steps": 1, "lr": 1e-4}}
    spec = parse_spec({**of_run, "data": {"kind": "file", "path": str(rows), "eval_share": 0.0}})
    text = plan_text(tandem.plan_run(spec, gpu="cpu"))
    assert "4 rows were read: sequences have 32 to 32 tokens" in text
    assert "a plan does not know how many images there are, and how large: each adds a token for every 16 x 16" in text
    with pytest.raises(SpecError, match="one process trains"):
        tandem.plan_run(spec.model_copy(update={"parallel": ParallelSpec(ranks=2)}), gpu="cpu")
    large = parse_spec({**of_run, "data": {"kind": "file", "path": str(rows)}})
    small = plan_run(large, gpu="4090", memory_gib=1.0, row_tokens=2048)
    assert (small.fits, small.ranks_that_fit) == (False, {})
    assert small.why_no_ranks == "one process trains a model that sees images"
