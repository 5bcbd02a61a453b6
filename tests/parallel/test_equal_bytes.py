"""1, 2 and 4 ranks, on one host or several, give the same bytes: of losses, weights, optimizer state and export."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from crew_cases import do_stages

from tandem.text.tokenizer import byte_tokenizer
from tandem.types import MEASURED

pytestmark = pytest.mark.usefixtures("forked_programs")
OWN = Path(__file__).with_name("own_rules.py")
CASES = {
    "sft": {},
    "sft recompute": {"model": {"activations": "recompute"}},
    "sft bf16": {"pretrained": True, "precision": {"weights": "bfloat16"}},
    "sft bf16 recompute": {"precision": {"weights": "bfloat16"}, "model": {"activations": "recompute"}},
    "sft bf16 fp32 master": {"pretrained": True, "precision": {"weights": "bfloat16", "master": "fp32"}},
    "sft adamw_8bit": {"optimizer": "adamw_8bit"},
    "sft muon": {"optimizer": "muon"},
    "sft muon bf16": {"optimizer": "muon", "precision": {"weights": "bfloat16"}},
    "sft apollo": {"optimizer": "apollo"},
    "sft apollo_mini bf16": {"optimizer": "apollo_mini", "precision": {"weights": "bfloat16"}},
    "sft adafactor": {"optimizer": "adafactor"},
    "sft own by rows": {"optimizer": f"{OWN}:SignMomentum"},
    "sft own whole bf16": {"optimizer": f"{OWN}:Centred", "precision": {"weights": "bfloat16"}},
    "sft lora": {"model": {"lora": {"rank": 4}}},
    "sft lora bf16": {"model": {"lora": {"rank": 4}}, "precision": {"weights": "bfloat16"}},
    "sft lora muon": {"model": {"lora": {"rank": 4}}, "optimizer": "muon"},
    "sft by step": {"sums": "step", "train": {"batch_size": 6, "micro_tokens": 16}},
    "sft by step bf16": {"sums": "step", "precision": {"weights": "bfloat16"}, "train": {"batch_size": 24}},
    "sft by step lora bf16": {
        "sums": "step",
        "model": {"lora": {"rank": 4}},
        "precision": {"weights": "bfloat16"},
        "train": {"batch_size": 7, "micro_tokens": 16},
    },
    "sft running": {"sums": "running", "train": {"batch_size": 9}},
    "sft running, many micro-batches": {"sums": "running", "train": {"batch_size": 10, "micro_tokens": 64}},
    "sft running bf16": {"sums": "running", "precision": {"weights": "bfloat16"}, "train": {"batch_size": 9}},
    "sft running lora bf16": {
        "sums": "running",
        "model": {"lora": {"rank": 4}},
        "precision": {"weights": "bfloat16"},
        "train": {"batch_size": 9},
    },
    "groups in the engine running": {
        "recipe": "rl",
        "in_engine": True,
        "sums": "running",
        "precision": {"weights": "bfloat16"},
    },
    "groups by step": {"recipe": "rl", "sums": "step", "train": {"micro_tokens": 32}},
    "sft hybrid": {"path": "hybrid"},
    "sft own loss": {"algorithm": {"name": f"{OWN}:focal"}},
    "preference": {"recipe": "preference"},
    "preference own loss": {"recipe": "preference", "algorithm": {"name": f"{OWN}:ipo", "reference": True}},
    "preference lora": {"recipe": "preference", "model": {"lora": {"rank": 4}}},
    "kto": {"recipe": "preference", "data": "kto", "algorithm": {"kind": "kto"}},
    "kto lora": {"recipe": "preference", "data": "kto", "algorithm": {"kind": "kto"}, "model": {"lora": {"rank": 4}}},
    "orpo lora": {"recipe": "preference", "algorithm": {"kind": "orpo"}, "model": {"lora": {"rank": 4}}},
    "groups": {"recipe": "rl"},
    "groups own loss": {"recipe": "rl", "algorithm": {"name": f"{OWN}:loss", "reference": True}},
    "groups lora": {"recipe": "rl", "model": {"lora": {"rank": 4}}},
    "groups in the engine": {"recipe": "rl", "in_engine": True},
    "groups in the engine bf16": {
        "recipe": "rl",
        "in_engine": True,
        "optimizer": "adamw_8bit",
        "precision": {"weights": "bfloat16"},
        "model": {"activations": "recompute"},
    },
}
LAYOUTS = {
    (2, 1): [
        "sft", "sft bf16 recompute", "sft adamw_8bit", "sft muon bf16", "sft apollo", "sft adafactor", "sft lora bf16",
        "preference", "groups lora", "sft own by rows", "groups own loss",
        "sft own loss", "preference own loss", "kto", "sft by step", "sft by step bf16", "sft hybrid",
        "groups in the engine", "groups in the engine bf16",
        "sft running", "sft running lora bf16", "groups in the engine running",
    ],
    (2, 2): ["sft bf16", "sft lora", "sft muon", "groups", "sft own whole bf16", "kto lora", "sft by step",
             "sft running bf16", "sft running lora bf16"],
    (4, 1): [
        "sft recompute", "sft bf16", "sft bf16 fp32 master", "sft muon", "sft apollo_mini bf16", "sft adafactor",
        "sft lora", "sft lora muon", "preference lora", "groups", "kto",
        "sft by step", "sft by step lora bf16", "groups by step", "groups in the engine bf16",
    ],
    (4, 2): ["sft", "sft bf16 recompute", "sft adamw_8bit", "sft lora bf16", "preference", "groups lora", "orpo lora",
             "sft by step bf16", "sft by step lora bf16",
             "sft running, many micro-batches"],
}  # fmt: skip
"""Which cases are trained on how many ranks and hosts, besides one. Each case is on one or two of the layouts, and each
layout has every recipe or its loss, both precisions, adapters, and another optimizer than AdamW."""
STEPS = int(os.environ.get("TANDEM_EQUAL_STEPS", "2"))
"""`TANDEM_EQUAL_STEPS=20` for the figure of docs/parallel.md."""
SLACK = ("state.json", "MANIFEST.json", "adapter_config.json")
"""Files with times in them, or with a set's order of this process."""


def spec_of(home: Path, changes: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    recipe, in_engine = changes.get("recipe", "sft"), changes.get("in_engine", False)
    path = changes.get("path", "model" if in_engine or changes.get("pretrained", False) else "")
    model = {**({"path": str(home / path)} if path else {"preset": "tiny"}), **changes.get("model", {})}
    spec: dict[str, Any] = {
        "recipe": recipe, "model": model, "checkpoint": {"every": STEPS},
        "eval": {"every": STEPS // 2, "examples": 3},
        "train": {"steps": STEPS, "lr": 1e-3, "micro_tokens": 128},
    }  # fmt: skip
    spec["train"]["optimizer"] = {"kind": changes.get("optimizer", "adamw")}
    if "precision" in changes:
        spec["precision"] = changes["precision"]
    if recipe == "rl":
        spec |= {
            "environment": {"name": "sort"}, "eval": {},
            "algorithm": changes.get("algorithm", {"kind": "grpo", "kl_coef": 0.05}),
            "engine": {"kind": "server"}, "sync": {"bridge": "adapter" if "lora" in model else "broadcast"},
        }  # fmt: skip
        if in_engine and ranks > 1:  # each rank holds what one of vLLM's workers would
            spec |= {"engine": {"kind": "vllm", "tensor_parallel": ranks}, "sync": {"bridge": "shared"}}
        spec["train"] |= {"groups_per_step": 4, "group_size": 4} | changes.get("train", {})
    else:
        spec["data"] = {"kind": "file", "path": str(home / f"{changes.get('data', recipe)}.jsonl"), "eval_share": 0.1}
        spec["train"] |= {"batch_size": 8} | changes.get("train", {})
        spec |= {"algorithm": changes["algorithm"]} if "algorithm" in changes else {}
    return spec


def write_data(home: Path) -> None:
    """Rows of different lengths."""

    def conversation(n: int) -> list[dict[str, str]]:
        question, answer = f"say {n}" * (1 + n % 4), "yes " * (1 + n % 5)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def pair(n: int) -> dict[str, str]:
        return {"prompt": f"say {n}", "chosen": "well " * (1 + n % 3), "rejected": "no " * (1 + n % 4)}

    def rated(n: int) -> dict[str, Any]:
        return {"prompt": f"say {n}", "completion": "well " * (1 + n % 4), "label": n % 3 > 0}

    rows: dict[str, Any] = {"sft": [{"messages": conversation(n)} for n in range(60)]}
    rows |= {"preference": [pair(n) for n in range(60)], "kto": [rated(n) for n in range(60)]}
    for name, each in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))


def write_model(directory: Path) -> None:
    """In bf16, with heads, rows and columns that vLLM's workers can deal evenly, in blocks of 8-bit moments, too."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(54)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    assert config.vocab_size == 320
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_hybrid(directory: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("crews")
    write_data(home)
    write_model(home / "model")
    write_hybrid(home / "hybrid")
    stages = {1: [work(home, 1, 1, case) for case in CASES]}
    for (ranks, hosts), cases in LAYOUTS.items():
        stages.setdefault(ranks, []).extend(work(home, ranks, hosts, case) for case in cases)
    do_stages(home, [{"ranks": ranks, "work": each} for ranks, each in stages.items()])
    return home


def work(home: Path, ranks: int, hosts: int, case: str) -> dict[str, Any]:
    changes = CASES[case]
    to, sums = place(ranks, hosts, case), changes.get("sums", "round")
    if ranks == 1 and sums == "running":  # up to three rounds a running sum has the order of the tree
        sums = "round"
    return {"spec": spec_of(home, changes, ranks), "hosts": hosts, "sums": sums, "to": to}


def place(ranks: int, hosts: int, case: str) -> str:
    return f"ranks-{ranks}-hosts-{hosts}/{case}"


def losses(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def hashes(run: Path) -> dict[str, str]:
    files = [path for part in ("export", "checkpoints", "saved") for path in sorted((run / part).rglob("*"))]
    return {
        path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file() and path.name not in SLACK
    }


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    ("ranks", "hosts", "case"), [(*layout, case) for layout, cases in LAYOUTS.items() for case in cases]
)
def test_several_ranks_give_the_bytes_of_one(trained, ranks, hosts, case):
    one, several = trained / place(1, 1, case), trained / place(ranks, hosts, case)
    assert len(losses(one)) == STEPS
    assert losses(several) == losses(one)
    assert len(hashes(one)) >= 3
    assert hashes(several) == hashes(one)


@pytest.mark.timeout(1100)
def test_cases_differ_from_each_other(trained):
    """Or the comparison would show nothing."""
    weights = [
        json.dumps(sorted(hashes(trained / place(1, 1, case)).items())) for case in CASES if "recompute" not in case
    ]
    assert len(set(weights)) == len(weights)


def test_every_case_is_on_several_ranks_and_every_layout_has_every_family():
    found = {layout: [CASES[case] for case in cases] for layout, cases in LAYOUTS.items()}
    assert {case for cases in LAYOUTS.values() for case in cases} == set(CASES)
    for cases in found.values():
        assert {"bfloat16", "float32"} == {each.get("precision", {}).get("weights", "float32") for each in cases}
        assert any("lora" in each.get("model", {}) for each in cases)
        assert any("lora" not in each.get("model", {}) for each in cases)
        assert any("optimizer" in each for each in cases)
        assert any(each.get("recipe") == "rl" for each in cases)
