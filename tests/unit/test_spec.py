"""Specs: what is refused, with which words, and what survives a round trip."""

from __future__ import annotations

import copy
import inspect
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tandem.build.run_engines import gpu_environment
from tandem.errors import SpecError
from tandem.spec.base import Spec
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.load import json_schema, load_spec, parse_overrides, parse_spec, to_toml
from tandem.spec.online import load_online_spec
from tandem.spec.run import RlSpec, SftSpec

EXAMPLES = Path(__file__).parents[2] / "examples"

RL = """
recipe = "rl"
[model]
preset = "tiny"
[environment]
name = "sort"
[train]
steps = 8
lr = 1e-4
groups_per_step = 2
group_size = 2
"""
SFT = """
recipe = "sft"
[model]
preset = "tiny"
[data]
kind = "file"
path = "rows.jsonl"
[train]
steps = 8
lr = 1e-4
"""
RL_WITH_WARMUP = RL + "[warmup]\nsteps = 5\nlr = 1e-3\n"
SERVER = RL + "[engine]\nkind = 'server'\n"
WITH_URL = SERVER + "url = 'http://127.0.0.1:9'\ntoken_file = 'token'\n"
REMOTE = RL + "[engine]\nkind = 'remote'\nurls = ['http://127.0.0.1:9/v1']\nmodel = 'm'\n"
SHARED = SERVER + "[sync]\nbridge = 'shared'\n"
BROADCAST = SERVER + "[sync]\nbridge = 'broadcast'\n"


def edited(text: str, *changes: str) -> dict[str, Any]:
    """A spec as TOML reads it, with `key.path = value` lines applied; an empty value removes the key."""
    raw = copy.deepcopy(tomllib.loads(text))
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        *tables, name = key.split(".")
        table = raw
        for part in tables:
            table = table.setdefault(part, {})
        if value:
            table[name] = tomllib.loads(f"v = {value}")["v"]
        else:
            del table[name]
    return raw


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(SpecError) as refused:
        parse_spec(edited(text, *changes))
    return str(refused.value)


# Every line: the spec, the change, the field and value that the refusal must show, and its way out.
BAD = [
    (RL, "train.lrr = 1", "train.lrr = 1: unknown here", "did you mean 'lr'?"),
    (RL, "trian.steps = 1", 'trian = {"steps": 1}: unknown here', "did you mean 'train'?"),
    (RL, "model.lora.rnk = 3", "model.lora.rnk = 3: unknown here", "did you mean 'rank'?"),
    (RL, "algorithm = {kind = 'grpo', clip_lo = 0.1}", "algorithm.clip_lo = 0.1", "did you mean 'clip_low'?"),
    (RL, "warmup = {steps = 5, lr = 1e-3, batchsize = 3}", "warmup.batchsize = 3", "did you mean 'batch_size'?"),
    (RL, "train.lr = nan", "train.lr = NaN", "finite number"),
    (RL, "train.lr = -inf", "train.lr = -Infinity", "finite number"),
    (RL, "train.lr = 0", "train.lr = 0: must be positive", ""),
    (RL, "train.lr = -1", "train.lr = -1: must be positive", ""),
    (RL, "train.lr = 1.5", "train.lr = 1.5", "less than 1"),
    (RL, 'train.lr = "1e-4"', 'train.lr = "1e-4"', "must be a number"),
    (RL, "train.steps = 0", "train.steps = 0", "greater than or equal to 1"),
    (RL, "train.steps = 2.5", "train.steps = 2.5", "must be a whole number"),
    (RL, "train.steps = true", "train.steps = true", "must be a whole number"),
    (RL, "train.group_size = 1", "train.group_size = 1", "greater than or equal to 2"),
    (RL, "train.temperature = 0", "train.temperature = 0", "must be positive"),
    (RL, "train.max_lag = 65", "train.max_lag = 65", "less than or equal to 64"),
    (RL, "train = 5", "train = 5: must be a table", "[train]"),
    (RL, 'model = "tiny"', 'model = "tiny": must be a table', "[model]"),
    (RL, "model.lora = true", "model.lora = true: must be a table", "[model.lora]"),
    (RL, 'model.lora = {targets = "q_proj"}', 'model.lora.targets = "q_proj"', "must be a list"),
    (RL, "model.lora = {targets = []}", "model.lora.targets = []", "at least 1 item"),
    (RL, "model = {preset = 'huge'}", 'model.preset = "huge"', "'tiny', 'small' or 'medium'"),
    (RL, "model = {}", "model.path: is missing", "add it"),
    (RL, "model =", "model: is missing", "add it"),
    (RL, "environment =", "environment: is missing", "add it"),
    (RL, "train.lr =", "train.lr: is missing", "add it"),
    (SFT, "data =", "data: is missing", "add it"),
    (RL, "recipe =", "recipe = (nothing)", 'write recipe = "rl", recipe = "sft", or recipe = "preference"'),
    (RL, "recipe = 'a2c'", 'recipe = "a2c"', 'write recipe = "rl", recipe = "sft", or recipe = "preference"'),
    (RL, "precision.weights = 'fp16'", 'precision.weights = "fp16": must be one of', "'float32', 'bfloat16'"),
    (RL, "precision.master = 'split'", "precision.weights: is missing", "write one of 'bfloat16', 'float32'"),
    (
        SFT,
        "precision = {weights = 'float32', master = 'none'}",
        'precision.master = "none": unknown here',
        'it belongs to precision.weights = "bfloat16". Known: weights',
    ),
    (
        RL,
        "train.schedule = {kind = 'constant', final = 0.1}",
        "train.schedule.final = 0.1: unknown here",
        'it belongs to train.schedule.kind = "cosine" or "linear". Known: kind',
    ),
    (RL, "precision = {weights = 'bfloat16', mastr = 'none'}", "precision.mastr", "did you mean 'master'?"),
    (RL, "precision.weights = [16]", 'precision.weights = "[16]"', "'float32', 'bfloat16'"),
    (RL, "algorithm = {kind = 'a2c'}", 'algorithm.kind = "a2c"', "'dr_grpo', 'grpo', 'rloo'"),
    (RL, "algorithm = {clip_low = 0.1}", "algorithm.kind: is missing", "'dr_grpo', 'grpo', 'gspo'"),
    (RL, "train.schedule = {final = 0.1}", "train.schedule.kind: is missing", "'constant', 'cosine', 'linear'"),
    (RL, 'train.schedule = "linear"', 'train.schedule = "linear": must be a table', "[train.schedule]"),
    (SFT, "data = {paht = 'rows.jsonl'}", "data.kind: is missing", "'dataset', 'file'"),
    (SFT, "data = {path = 'rows.xls'}", 'data.path = "rows.xls"', "a data set of the hub is data.name"),
    (SFT, "data = {name = 'rows.csv'}", 'data.name = "rows.csv"', "write it as path"),
    (SFT, "data.eval_share = 1.0", "data.eval_share = 1.0", "less than 1"),
    (RL, "sync.bridge = 'telepathy'", 'sync.bridge = "telepathy"', "'inproc'"),
    (RL, "engine.kind = 'llama'", 'engine.kind = "llama"', "'hf'"),
    (RL, "sync.bridge = 'shared'", "sync.bridge = 'shared'", "engines in processes of their own"),
    (
        WITH_URL,
        "engine.deadline_s = 5.0",
        "engine.kind = 'server'",
        "(the default) does not reach; add sync.bridge = 'shared' (one",
    ),
    (
        RL,
        "sync.bridge = 'disk'",
        "sync.bridge = 'disk'",
        "engine.kind = 'hf' (the default) runs inside the trainer; add",
    ),
    (SERVER, "sync.bridge = 'adapter'", "sync.bridge = 'adapter'", "add [model.lora]"),
    (REMOTE, "sync.bridge = 'disk'", "sync.bridge = 'disk'", "choose 'adapter'"),
    (WITH_URL + "replicas = 2\n", "sync.bridge = 'disk'", "engine.replicas = 2", "engine.url names one"),
    (WITH_URL, "sync.bridge = 'restart'", "sync.bridge = 'restart'", "choose 'disk'"),
    (WITH_URL + "[sync]\nbridge = 'disk'\n", "engine.token_file = ''", "engine.url = 'http://127", "engine.token_file"),
    (WITH_URL + "[sync]\nbridge = 'disk'\n", "engine.url = '127.0.0.1:9'", "engine.url = ", "https?"),
    (SHARED, "engine = {kind = 'vllm', gpus = [-1]}", "engine.gpus", "greater than or equal to 0"),
    (SHARED, "engine.replicas = 2", "engine.replicas = 2", "choose 'broadcast'"),
    (SHARED, "model.lora = {rank = 4}", "sync.bridge = 'shared'", "'adapter_broadcast'"),
    (SHARED, "precision = {weights = 'bfloat16', master = 'none'}", "sync.bridge = 'shared'", "'split'"),
    (SHARED, "train.gradient_release = true", "train.gradient_release = true", "leave one of them out"),
    (SHARED + "every = 2\n", "train.max_lag = 1", "sync.every = 2", "one copy of the weights"),
    (RL, "engine = {kind = 'vllm', on_update = 'follow'}", "engine.on_update", "'continue', 'finish' or 'restart'"),
    (SHARED, "engine = {kind = 'vllm', sleep = 'free'}", "engine.sleep = 'free'", "choose another bridge"),
    (SHARED, "engine = {kind = 'vllm', tensor_parallel = 2}", "engine.tensor_parallel = 2", "choose 'broadcast'"),
    (SHARED, "engine = {kind = 'vllm', gpus = [1]}", "engine.gpus = [1]", "leave gpus out"),
    (BROADCAST, "engine = {kind = 'vllm', gpus = [1, 2]}", "engine.gpus = [1, 2]", "need 1 different GPUs"),
    (BROADCAST, "engine = {kind = 'vllm', gpus = [1, 1], replicas = 2}", "engine.gpus = [1, 1]", "need 2 different"),
    (
        SERVER + "[sync]\nbridge = 'adapter'\n[model.lora]\nrank = 600\n",
        "engine.kind = 'vllm'",
        "model.lora.rank = 600",
        "512 at most",
    ),
    (RL, "device = 'gpu'", 'device = "gpu"', "'auto', 'cpu' or 'cuda'"),
    (RL, "name = '../x'", 'name = "../x"', "match pattern"),
    (RL, "seed = -1", "seed = -1", "greater than or equal to 0"),
    (RL, "deterministic = 'yes'", 'deterministic = "yes"', "must be true or false"),
    (RL, "train.optimizer = {kind = 'adamw', betas = [0.9, 1.0]}", "train.optimizer.betas.1 = 1.0", "less than 1"),
    (RL, "eval.tasks = 1", "eval.tasks = 1", "greater than or equal to 2"),
    (RL, "train.schedule = {kind = 'linear', warmup_steps = 8}", "train.schedule.warmup_steps = 8", "train.steps = 8"),
    (SFT, "train.schedule = {kind = 'linear', warmup_steps = 9}", "train.schedule.warmup_steps = 9", "train.steps = 8"),
    (
        RL_WITH_WARMUP,
        "warmup.schedule = {kind = 'constant', warmup_steps = 5}",
        "warmup.schedule.warmup_steps = 5",
        "raise warmup.steps",
    ),
]


@pytest.mark.parametrize(("spec", "change", "shown", "way_out"), BAD, ids=[change for _, change, _, _ in BAD])
def test_a_refusal_names_the_field_the_value_and_the_way_out(spec: str, change: str, shown: str, way_out: str):
    message = refusal(spec, change)
    assert message.startswith(shown)
    assert way_out in message


# A knob that this kind of run, stage or union member cannot use.
USELESS = [
    (SFT, "train.group_size = 4", "train.group_size = 4"),
    (SFT, "train.max_lag = 1", "train.max_lag = 1"),
    (SFT, "algorithm = {kind = 'grpo'}", "algorithm"),
    (SFT, "engine = {kind = 'hf'}", "engine"),
    (SFT, "sync = {every = 1}", "sync"),
    (SFT, "environment = {name = 'sort'}", "environment"),
    (SFT, "warmup = {steps = 5, lr = 1e-3}", "warmup"),
    (SFT, "eval = {tasks = 5}", "eval.tasks = 5"),
    (SFT, "data.subset = 'x'", "data.subset"),
    (SFT, "data = {kind = 'dataset', name = 'x', path = 'rows.jsonl'}", "data.path"),
    (RL, "data = {kind = 'file', path = 'rows.jsonl'}", "data"),
    (RL, "train.batch_size = 4", "train.batch_size = 4"),
    (RL, "eval = {examples = 5}", "eval.examples = 5"),
    (RL, "train.schedule = {kind = 'constant', final = 0.1}", "train.schedule.final = 0.1"),
    (RL, "algorithm = {kind = 'dr_grpo', spread_floor = 0.1}", "algorithm.spread_floor = 0.1"),
    (RL, "algorithm = {kind = 'rloo', spread_floor = 0.1}", "algorithm.spread_floor = 0.1"),
    (RL, "model.path = 'there'", "model.path"),
    (RL, "model.revision = 'main'", "model.revision"),
    (RL, "environment.letters = 4", "environment.letters = 4"),
    (RL_WITH_WARMUP, "warmup.group_size = 4", "warmup.group_size = 4"),
    (RL_WITH_WARMUP, "warmup.data = {kind = 'demonstrations', path = 'rows.jsonl'}", "warmup.data.path"),
]


@pytest.mark.parametrize(("spec", "change", "field"), USELESS, ids=[change for _, change, _ in USELESS])
def test_a_knob_that_cannot_be_used_is_refused(spec: str, change: str, field: str):
    message = refusal(spec, change)
    assert message.startswith(field)
    assert "unknown here" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("text", [RL, SFT, RL_WITH_WARMUP, SHARED, WITH_URL + "[sync]\nbridge = 'disk'\n"])
def test_the_specs_that_the_refusals_start_from_are_good(text: str):
    assert parse_spec(edited(text)).train.steps == 8


def test_a_refused_key_is_told_the_keys_of_its_own_table_and_of_the_member_that_was_chosen():
    assert "Known: alpha, base, rank, targets" in refusal(RL, "model.lora.rnk = 3")
    assert "Known: kind, warmup_steps" in refusal(RL, "train.schedule = {kind = 'constant', final = 0.1}")
    assert "final, kind, warmup_steps" in refusal(RL, "train.schedule = {kind = 'cosine', finale = 0.1}")
    assert "path, revision, thinking" in refusal(RL, "model = {path = 'x', presett = 'tiny'}")
    assert "preset, thinking" in refusal(RL, "model.paht = 'x'")
    assert "eval_path" in refusal(SFT, "data.pth = 'x'")


def test_every_mistake_is_named_at_once():
    lines = refusal(RL, "train.lr = 1.5", "train.steps = 0", "foo = 3").splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["train.steps", "train.lr", "foo"]


@pytest.mark.parametrize("change", ["model = 'tiny'", "model.lora = {targets = [3]}", "train.schedule = {kind = 'x'}"])
def test_nothing_of_pydantic_shows_in_a_refusal(change: str):
    message = refusal(RL, change)
    for inside in ("existing", "from-scratch", "literal[", "tuple[", "tag", "discriminator", "Spec", "pydantic"):
        assert inside not in message


@pytest.mark.parametrize(("max_lag", "every"), [(0, 2), (3, 5)])
def test_sync_every_stays_within_max_lag_plus_one(max_lag: int, every: int):
    message = refusal(RL, f"train.max_lag = {max_lag}", f"sync.every = {every}")
    assert message.startswith(f"sync.every = {every}")
    assert f"set sync.every to at most {max_lag + 1}, or train.max_lag to at least {every - 1}" in message


def test_a_bridge_with_one_copy_of_the_weights_has_no_use_for_sync_every():
    message = refusal(RL, "train.max_lag = 3", "sync.every = 4")
    assert message.startswith("sync.every = 4: bridge = 'inproc' has one copy of the weights")


def test_whole_numbers_are_numbers_and_lists_are_tuples():
    spec = parse_spec(
        edited(RL, "eval.confidence = 0.9", "train.optimizer = {kind = 'adamw', betas = [0, 0.5]}", "engine.kv_gib = 2")
    )
    assert isinstance(spec, RlSpec)
    assert (spec.train.optimizer.betas, spec.engine.kv_gib) == ((0.0, 0.5), 2.0)


def test_a_spec_cannot_be_changed():
    spec = parse_spec(edited(RL))
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 3  # type: ignore[misc]


# --- files and --set


def spec_file(tmp_path: Path, text: str = RL) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return path


def test_set_takes_numbers_strings_booleans_lists_and_tables(tmp_path: Path):
    spec = load_spec(
        spec_file(tmp_path),
        (
            "train.lr=3e-5",
            "train.steps=12",
            "model.preset=small",  # a bare word is a string
            'name="two-words"',
            "strict=true",
            "model.lora.rank=8",  # makes the table
            'model.lora.targets=["q_proj","v_proj"]',
            "train.schedule={kind='cosine', final=0.2}",
            "environment.params.letters=3",
            " seed = 7",
        ),
    )
    assert isinstance(spec, RlSpec)
    assert (spec.train.lr, spec.train.steps, spec.strict, spec.seed, spec.name) == (3e-5, 12, True, 7, "two-words")
    assert spec.model.preset == "small"  # type: ignore[union-attr]
    assert spec.model.lora is not None
    assert (spec.model.lora.rank, spec.model.lora.targets) == (8, ("q_proj", "v_proj"))
    assert (spec.train.schedule.kind, spec.environment.params) == ("cosine", {"letters": 3})


def test_the_last_set_wins(tmp_path: Path):
    assert load_spec(spec_file(tmp_path), ("seed=1", "seed=2")).seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr", "--set train.lr: write key.path=value"),
        ("=3", "--set =3: write key.path=value"),
        ("train..lr=3", "--set train..lr=3: write key.path=value"),
        ("train.lr.x=3", "--set train.lr.x=3: 'lr' is a value in this spec, not a table"),
        ("train.lr=fast", 'train.lr = "fast"'),
        ("train.lr=", 'train.lr = ""'),
        ("train.lrr=1e-4", "train.lrr = 0.0001: unknown here; did you mean 'lr'?"),
        ("train.lr=nan", "train.lr = NaN"),
        ("name=5", "name = 5"),
    ],
)
def test_a_bad_set_is_refused(tmp_path: Path, override: str, expected: str):
    with pytest.raises(SpecError) as refused:
        load_spec(spec_file(tmp_path), (override,))
    assert str(refused.value).startswith(expected)


def test_sets_alone_make_nested_tables():
    assert parse_overrides(("a.b=1", "a.c.d=x", "e=2.5")) == {"a": {"b": 1, "c": {"d": "x"}}, "e": 2.5}


@pytest.mark.parametrize(
    ("content", "expected"), [(b"recipe = ", "is not TOML"), (b"\xff\xfe", "is not TOML"), (None, "cannot be read")]
)
def test_a_file_that_is_no_spec_is_named(tmp_path: Path, content: bytes | None, expected: str):
    path = tmp_path / "spec.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as refused:
        load_spec(path)
    assert str(refused.value).startswith(f"{path}: {expected}")


# --- out again

FULL = (
    "model = {preset = 'small', lora = {rank = 4, targets = ['q_proj']}, thinking = true}",
    "environment.params = {word = \"a\\\"b\\n'\\u007f\", 'odd key' = [1, 2.5, true], deep = {x = {y = 1e-9}}}",
    "warmup = {steps = 5, lr = 1e-3, data = {kind = 'file', path = 'ä.jsonl'}, schedule = {kind = 'cosine'}}",
    "algorithm = {kind = 'grpo', kl_coef = 1e-3}",
)


@pytest.mark.parametrize("raw", [edited(RL), edited(SFT), edited(RL_WITH_WARMUP), edited(RL, *FULL)])
def test_a_spec_written_as_toml_reads_back_equal(raw: dict[str, Any]):
    spec = parse_spec(raw)
    text = to_toml(spec)
    assert parse_spec(tomllib.loads(text)) == spec
    assert to_toml(parse_spec(tomllib.loads(text))) == text


def test_every_example_loads_and_a_run_s_reads_back_equal():
    for path in EXAMPLES.glob("*.toml"):
        if path.name == "online.toml":
            load_online_spec(path)
        else:
            spec = load_spec(path)
            assert parse_spec(tomllib.loads(to_toml(spec))) == spec


def test_overrides_of_an_example_reach_both_stages():
    spec = load_spec(EXAMPLES / "quickstart.toml", ("train.steps=8", "warmup.steps=11"))
    assert isinstance(spec, RlSpec)
    assert spec.warmup is not None
    assert (spec.train.steps, spec.warmup.steps) == (8, 11)


# --- the schema


def spec_classes(annotation: Any = RlSpec | SftSpec, seen: frozenset[type] = frozenset()) -> Iterator[type[BaseModel]]:
    """Every class of a spec, however deep in unions and annotations."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            yield annotation
            for field in annotation.model_fields.values():
                yield from spec_classes(field.annotation, seen | {annotation})
        return
    for inner in typing.get_args(annotation):
        yield from spec_classes(inner, seen)


CLASSES = sorted(set(spec_classes()), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_and_field_of_a_spec_says_what_it_is(cls: type[BaseModel]):
    assert issubclass(cls, Spec)
    assert (cls.__doc__ or "").strip()
    for name, field in cls.model_fields.items():
        if name not in ("kind", "recipe", "bridge"):  # the member's own docstring says it
            assert field.description, f"{cls.__name__}.{name} has no docstring"


def test_the_walk_over_spec_classes_finds_the_deep_ones():
    names = {cls.__name__ for cls in CLASSES}
    assert {"RlSpec", "SftSpec", "LoraSpec", "CosineSchedule", "Demonstrations", "DatasetData", "RlooSpec"} <= names
    assert len(names) >= 20


def test_the_schema_tells_recipes_and_kinds_apart():
    schema = json_schema()
    assert schema["discriminator"]["propertyName"] == "recipe"
    assert sorted(schema["discriminator"]["mapping"]) == ["preference", "rl", "sft"]
    assert len(schema["oneOf"]) == 3
    properties = schema["$defs"]["RlSpec"]["properties"]
    assert {"dr_grpo", "grpo", "rloo"} < set(properties["algorithm"]["discriminator"]["mapping"])
    assert "group_size" not in schema["$defs"]["SftStage"]["properties"]
    assert all(node["additionalProperties"] is False for node in schema["$defs"].values())


def test_each_replica_has_its_gpus() -> None:
    own = VllmEngineSpec(gpus=(1, 2, 3, 4), tensor_parallel=2, replicas=2)
    assert [own.gpus_of(number) for number in range(2)] == [(1, 2), (3, 4)]
    shared = VllmEngineSpec(gpus=(3,), replicas=2, memory_share=0.4)
    assert [shared.gpus_of(number) for number in range(2)] == [(3,), (3,)]
    assert VllmEngineSpec().gpus_of(0) == ()


@pytest.mark.parametrize("gpus", [(), (1,)])
def test_replicas_that_do_not_fit_on_one_gpu_are_refused(gpus: tuple[int, ...]) -> None:
    engine = VllmEngineSpec(gpus=gpus, replicas=2)
    with pytest.raises(SpecError, match=r"engine.replicas = 2: on one GPU each would take memory_share = 0.9"):
        gpu_environment(engine, 0, "cuda")
    gpu_environment(engine, 0, "cpu")
    smaller = engine.model_copy(update={"memory_share": 0.45})
    assert gpu_environment(smaller, 1, "cuda") == ({"CUDA_VISIBLE_DEVICES": "1"} if gpus else {})


def test_replicas_are_started_on_gpus_of_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    engine = VllmEngineSpec(gpus=(1, 2), replicas=2)
    assert [gpu_environment(engine, number, "cuda") for number in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]


@pytest.mark.parametrize("load", [load_spec, load_online_spec])
def test_a_file_that_is_no_spec_is_refused_in_one_line(load: Any, tmp_path: Path):
    deep = "x = " + "[" * 20_000 + "]" * 20_000
    for content, why in ((deep, "nested too deeply"), ("\0\1", "is not TOML"), (b"\xff\xfe", "is not TOML")):
        path = tmp_path / "spec.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(SpecError, match=why):
            load(path)
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(SpecError, match=r"--set x=.*nested too deeply"):
        load(Path(__file__).parents[2] / "examples" / "quickstart.toml", (deep.replace(" ", ""),))
