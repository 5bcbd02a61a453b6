"""The cards that people own: their data sheets, the names that nvidia-smi prints, and plans for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.runs.planner.calibration import card_named, card_within, cards, known, machine, usd_per_hour
from tandem.runs.planner.plan import kind_of
from tandem.spec.load import load_spec

SPEC = """
recipe = "sft"
model = { path = "MODEL", lora = { rank = 16 } }
data = { path = "rows.jsonl" }
train = { steps = 50, lr = 1e-4 }
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
        "tie_word_embeddings": False, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "spec.toml").write_text(SPEC.replace("MODEL", str(tmp_path)))
    return str(tmp_path / "spec.toml")


def planned(spec: str, *options: str) -> str:
    return CliRunner().invoke(app, ["plan", spec, "--row-tokens", "512", *options]).output


@pytest.mark.parametrize(
    ("printed", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA GeForce RTX 5090", "5090"), ("NVIDIA GeForce RTX 3090", "3090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100 80GB PCIe", "a100-80"), ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""), ("NVIDIA H100 PCIe", ""), ("NVIDIA GB200", ""), ("4090", "4090"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_the_name_that_nvidia_smi_prints(printed: str, card: str):
    assert card_named(printed) == card


@pytest.mark.parametrize("card", [*cards()])
def test_a_run_is_planned_for_each_card_and_an_unknown_price_is_said(spec: str, card: str):
    told = planned(spec, "--card", card)
    assert told.startswith(f"{card}: {cards()[card]['memory_gib']:.1f} GiB, of which ")
    known_price = usd_per_hour(card) is not None
    assert known_price == (card in ("h100", "h200"))
    assert (f"price of '{card}' not known (--prices FILE has yours)" in told) != known_price


def test_a_price_of_ones_own_is_used(spec: str, tmp_path: Path):
    (tmp_path / "prices.toml").write_text("4090 = 0.4\n")
    told = planned(spec, "--gpu", "4090", "--prices", str(tmp_path / "prices.toml"), "--json")
    plan = json.loads(told)
    assert plan["usd"] == pytest.approx(plan["times"]["steps_s"] / 3600 * 0.4)


def test_a_provider_s_name_of_a_card_is_known():
    names = {"nvidia_h100_pcie": "h100", "NVIDIA L40S": "l40s", "rtx4090": "4090", "B200": "b200", "tpu": "", "": ""}
    assert {name: card_within(name) for name in names} == names


def test_what_was_measured_on_an_h200_is_scaled_by_data_sheets():
    base, other = machine("h200"), machine("4090")
    assert other.train_flops / base.train_flops == pytest.approx(165.2 / 989.0)
    assert other.compiled_passed_gb_s / base.compiled_passed_gb_s == pytest.approx(1008 / 4800)
    assert (other.layer_s, other.bandwidth_gb_s, other.link_gb_s) == (base.layer_s, 1008.0, 0.0)
    assert "not measured" in other.source
    assert machine("NVIDIA H200").source == base.source != other.source


def test_the_help_and_the_refusal_name_every_card(spec: str):
    told = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["plan", "--help"]).output
    assert all(card in told for card in cards())
    refused = CliRunner().invoke(app, ["plan", spec, "--gpu", "8090"])
    assert str(refused.exception) == f"--gpu 8090: no figures of it; known are {', '.join(known())}"


@pytest.mark.parametrize(
    ("smi", "first"),
    [
        ("NVIDIA GeForce RTX 4090, 24564, 24000", "4090: 24.0 GiB"),
        ("NVIDIA RTX A6000, 49140, 49000", "h200: 48.0 GiB"),
        ("", "h200: 139.8 GiB"),
    ],
)
def test_a_plan_is_for_the_card_that_is_here(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi: str, first: str
):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{smi}'\n" if smi else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    told = planned(spec)
    assert told.startswith(first)
    unknown = "'NVIDIA RTX A6000' is not in cards.toml: its memory is known, and the seconds are those of 'h200'"
    assert (unknown in told) == ("A6000" in smi)


def test_a_profile_is_planned_for_a_card_of_its_size(spec: str):
    assert planned(spec, "--set", "profile=24gb").startswith("4090: ")
    kinds = {profile: kind_of(load_spec(spec, [f"profile={profile}"])) for profile in ("24gb", "80gb", "laptop")}
    assert kinds == {"24gb": "4090", "80gb": "h100", "laptop": "cpu"}
