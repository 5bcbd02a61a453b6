"""Sixty typical wrong specs, many with names of other libraries: one sentence with field, value, way out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.__main__ import main
from tandem.cli.main import app
from tandem.cli.options import checked_spec
from tandem.errors import SpecError
from tandem.spec import others_names
from tandem.spec.load import json_schema, parse_overrides, parse_spec

BASES = {
    "rl": ["model.preset=tiny", "environment.name=sort", "train.steps=4", "train.lr=1e-4", "train.groups_per_step=2",
           "train.group_size=4"],
    "sft": ["model.path=some/model", "data.kind=file", "data.path=rows.jsonl", "train.steps=4", "train.lr=1e-4"],
    "preference": ["model.preset=tiny", "data.kind=file", "data.path=pairs.jsonl", "train.steps=4", "train.lr=1e-4"],
}  # fmt: skip

# Recipe, what is set, and what the message says after the field and the value.
WRONG = [
    # names of TRL
    ("rl", "train.learning_rate=0.01", "write train.lr"),
    ("rl", "train.num_generations=8", "write train.group_size"),
    ("rl", "train.per_device_train_batch_size=8", "train.groups_per_step and train.group_size"),
    ("sft", "train.per_device_train_batch_size=8", "write train.batch_size"),
    ("sft", "train.gradient_accumulation_steps=4", "write train.micro_tokens"),
    ("rl", "train.max_completion_length=256", "write train.max_tokens"),
    ("rl", "train.max_prompt_length=256", "engine.max_context bounds prompt and answer together"),
    ("rl", "algorithm.beta=0.04", "write algorithm.kl_coef"),
    ("rl", "algorithm.epsilon=0.2", "write algorithm.clip_low and algorithm.clip_high"),
    ("rl", "algorithm.loss_type=dapo", "write algorithm.kind"),
    ("rl", "train.num_train_epochs=3", "write train.steps"),
    ("sft", "train.max_steps=3", "write train.steps"),
    ("sft", "train.max_seq_length=2048", "write data.max_tokens"),
    ("sft", "train.warmup_ratio=0.1", "write train.schedule.warmup_steps"),
    ("sft", "train.lr_scheduler_type=cosine", "write train.schedule.kind"),
    ("sft", "train.optim=adamw_8bit", "write train.optimizer.kind"),
    ("sft", "train.weight_decay=0.01", "write train.optimizer.weight_decay"),
    ("sft", "train.max_grad_norm=0.1", "write train.clip_norm"),
    ("rl", "train.bf16=true", 'write precision.weights = "bfloat16"'),
    ("rl", "bf16=true", 'write precision.weights = "bfloat16"'),
    ("rl", "use_vllm=true", 'write engine.kind = "vllm"'),
    ("rl", "engine.vllm_gpu_memory_utilization=0.3", "write engine.memory_share"),
    ("sft", "output_dir=out", "write --run-dir of `tandem train`"),
    ("sft", "report_to=wandb", "write track.to"),
    ("rl", "run_name=mine", "write name"),
    ("rl", "train.save_steps=50", "write checkpoint.every"),
    ("rl", "train.eval_steps=50", "write eval.every"),
    ("sft", "model.model_name_or_path=x", "write model.path"),
    ("sft", "model.attn_implementation=flash_attention_2", "write model.attention"),
    ("sft", "model.torch_dtype=bfloat16", "write precision.weights"),
    ("sft", "train.gradient_checkpointing=true", 'write model.activations = "recompute"'),
    ("rl", "reward_funcs=f", 'write reward in environment.params, with environment.name = "prompts"'),
    # names of Unsloth and PEFT
    ("sft", "model.load_in_4bit=true", 'write model.lora.base = "nf4"'),
    ("sft", "model.lora_r=16", "write model.lora.rank"),
    ("sft", "model.lora.r=16", "write model.lora.rank"),
    ("sft", "model.lora.lora_alpha=16", "write model.lora.alpha"),
    ("sft", "model.lora.target_modules=[]", "write model.lora.targets"),
    ("sft", "model.lora.lora_dropout=0.1", "adapters have no dropout"),
    # names of verl, prime-rl, SkyRL and NeMo-RL
    ("rl", "actor_rollout_ref.rollout.n=8", "write tables [model], [train] and [engine]"),
    ("rl", "trainer.total_epochs=8", "write tables [train], [eval] and [checkpoint]"),
    ("rl", "train.ppo_mini_batch_size=8", "write train.groups_per_step"),
    ("rl", "algorithm.adv_estimator=grpo", "write algorithm.kind"),
    ("rl", "algorithm.clip_ratio_high=0.28", "write algorithm.clip_high"),
    ("rl", "train.rollouts_per_example=8", "write train.group_size"),
    ("rl", "train.max_async_level=2", "write train.max_lag"),
    ("rl", "train.num_prompts_per_step=8", "write train.groups_per_step"),
    ("rl", "algorithm.kl_loss_coef=0.1", "write algorithm.kl_coef"),
    ("rl", "parallel.n_gpus_per_node=8", "write parallel.ranks"),
    # values of others
    ("rl", "recipe=GRPO", 'write recipe = "rl", and [algorithm] kind = "grpo"'),
    ("rl", "recipe=dpo", 'write recipe = "preference"'),
    ("rl", "recipe=qlora", 'write recipe = "sft"'),
    ("rl", "algorithm.kind=GRPO", "must be 'grpo'; one of"),
    ("sft", "train.optimizer.kind=paged_adamw_8bit", "must be 'adamw_8bit'; one of"),
    ("sft", "train.schedule.kind=constant_with_warmup", "must be 'constant'; one of"),
    ("rl", "engine.kind=sglang", "must be 'remote'; one of"),
    # slips
    ("rl", 'train.lr="1e-4"', "must be a number"),
    ("rl", "train.lr=-1", "must be positive"),
    ("rl", "train.steps=0", "must be greater than or equal to 1"),
    ("rl", "train.steps=4.5", "must be a whole number"),
    ("rl", "train.group_sise=4", "did you mean 'group_size'?"),
    ("rl", "train.batch_size=4", "remove it."),
    ("rl", "model=tiny", "must be a table, as in [model]"),
    ("rl", "model.preset=huge", "must be 'tiny', 'small' or 'medium'"),
    ("rl", "engine.kind=vlm", "must be one of"),
    ("rl", "device=mps", "64-bit numbers, which a Mac's GPU does not have; set 'cpu'"),
    ("rl", "sync.bridge=disk", "add engine.kind = 'server' or 'vllm'"),
    ("rl", "train.temperature=0", "must be positive"),
    ("sft", "environment.name=sort", "remove it."),
]


@pytest.mark.parametrize(("recipe", "override", "way_out"), WRONG, ids=[override for _, override, _ in WRONG])
def test_a_wrong_spec_is_one_sentence_with_field_value_and_way_out(recipe: str, override: str, way_out: str):
    with pytest.raises(SpecError) as refused:
        parse_spec(parse_overrides([f"recipe={recipe}", *BASES[recipe], override]))
    (told,) = str(refused.value).split("\n")
    field, value = override.split("=", 1)
    table = field.split(".")[0]
    assert told.startswith((f"{field} = ", f"{table} = "))
    assert value.strip('"[]') in told
    assert way_out in told
    assert len(told) < 400


def test_the_command_prints_no_traceback_for_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "empty.toml").touch()
    for recipe, override, way_out in WRONG:
        told = [part for each in (f"recipe={recipe}", *BASES[recipe], override) for part in ("--set", each)]
        monkeypatch.setattr("sys.argv", ["tandem", "train", str(tmp_path / "empty.toml"), *told])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert (end.value.code, printed.out) == (2, ""), override
        assert printed.err.startswith("tandem: "), override
        assert way_out in printed.err, override
        assert "Traceback" not in printed.err, override


@pytest.mark.parametrize("recipe", ["rl", "sft", "preference"])
def test_a_spec_grows_from_its_recipe_by_what_the_messages_say(recipe: str):
    raw: dict[str, Any] = {"recipe": recipe}
    for _ in range(4):
        try:
            parse_spec(raw)
            break
        except SpecError as refused:
            for told in str(refused).split("\n"):
                line = re.search(r"as in ([\w.]+ = (?:\{.*\}|\"[^\"]*\"|'[^']*'|[\w.-]+))", told)
                assert line, told
                raw |= tomllib.loads(line[1])
    else:
        pytest.fail(f"still wrong: {raw}")


def test_a_spec_of_settings_alone_needs_no_file():
    settings = ["recipe=sft", "model.preset=tiny", "data.path=rows.jsonl", "train.lr=1e-3", "train.steps=2"]
    assert checked_spec(None, settings) == parse_spec(parse_overrides(settings))
    refused = CliRunner().invoke(app, ["train", "--set", "recipe=sft"])
    assert str(refused.exception).startswith("model: is missing; add it, as in model = ")
    none = CliRunner().invoke(app, ["train"])
    assert (none.exit_code, "recipe=sft" in none.output) == (2, True)


@pytest.mark.parametrize(
    ("typed", "way_out"),
    [
        ("sft --dataset_name x", 'write recipe = "sft"'),
        ("grpo", 'write recipe = "rl", and [algorithm] kind = "grpo"'),
        ("reward", 'write recipe = "preference", and [algorithm] kind = "reward_model"'),
        ("trian a.toml", "Did you mean 'train'?"),
        ("train --model_name_or_path x", "write model.path"),
        ("plan a.toml --dataset-name=x", "write data.name for a data set of the hub"),
    ],
)
def test_a_command_line_of_trl_is_answered_with_ours(typed: str, way_out: str):
    told = CliRunner().invoke(app, typed.split())
    words = re.sub(r"[\s│]+", " ", told.output)
    assert (told.exit_code, way_out in words) == (2, True), words


def test_there_are_sixty_of_them_and_names_of_others_are_most():
    assert len(WRONG) >= 60
    assert len(others_names.FIELDS) >= 80


def fields(node: Any, definitions: dict[str, Any], path: str = "") -> set[str]:
    """All fields of a spec, with their paths."""
    if isinstance(node, list):
        return set().union(*(fields(each, definitions, path) for each in node))
    if "$ref" in node:
        return fields(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions, path)
    found = {path} if path else set()
    for name, inner in node.get("properties", {}).items():
        found |= fields(inner, definitions, f"{path}.{name}" if path else name)
    return found.union(*(fields(node[key], definitions, path) for key in ("oneOf", "anyOf", "allOf") if key in node))


def test_what_a_hint_names_is_a_field_of_a_spec():
    schema = json_schema()
    known = fields(schema, schema["$defs"])
    assert {"train.lr", "model.lora.base", "train.schedule.warmup_steps"} <= known
    for name, ours in others_names.FIELDS.items():
        named = re.findall(r"(?<![\w`\[])[a-z]+(?:\.[a-z_]+)+", ours)
        assert set(named) <= known, name
        assert set(re.findall(r"\[(\w+)\]", ours)) <= known, name
