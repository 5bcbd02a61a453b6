"""docs/families.md: what the suite found, as a table. `python docs/make_families.py` writes it."""

from __future__ import annotations

from collections.abc import Callable

import family_vllm
import transformers
from family_models import FAMILIES
from family_suite import CELLS, TEXT_ONLY, outcomes

HEAD = """\
# Model families

This page is made by a suite (`python docs/make_families.py`), which a slow test runs again and compares. Each row is a
family at a tiny size with random weights, on a CPU, as transformers {version} has it; in float32, except for the column
bf16. Each cell is a check:
**yes** means that it holds, a number that Tandem refuses it, with the sentence below the table.

| column | what is checked |
|---|---|
| trainer | the trainer's logprobs are those of plain transformers, within 1e-5 |
| packing | several sequences in one row give the logprobs of each alone, within 1e-5 |
| prompt trees | siblings that share one copy of their prompt do, too |
| SFT | packed sequences have the gradient of single ones, within 1e-5 (see below); and a step of all weights |
| SFT, LoRA | a step of LoRA |
| all weights, inproc | after a step, the embedded engine's logprobs of what it sampled are the trainer's, within 1e-4 |
| bf16, inproc | the same in bfloat16: within 0.05 nats in the mean over the tokens |
| LoRA, inproc | the same with adapters |
| int8, nf4 | the same with adapters on a base in few bits |
| shared | as "all weights, inproc", for an engine server whose memory the trainer trains in |
| broadcast | as "all weights, inproc", for an engine server that gets all weights in buckets |
| adapter | as "LoRA, inproc", for an engine server that gets adapters as files |
| adapter_broadcast | as "LoRA, inproc", for an engine server that gets adapters straight into its memory |
| disk | as "all weights, inproc", for an engine server that gets checkpoints as files |
| restart | the same, for an engine server that is started again with each checkpoint |
| export | plain transformers loads what was exported after a step, with the trainer's logprobs |
| ranks | several ranks can read the model's files by rows |
| images | trainer, packing, prompt trees, SFT and export hold for rows with images; "text only": it takes none |

The columns shared to restart are the bridges to Tandem's own engine server (`engine.kind = "server"`), a process of its
own. Trainer, engine, bridge and publisher are those of a run, with its proofs: two versions are published, one as the
model was loaded and one after a step, and then the server answers prompts of different lengths at once. Every token
must be of the second version.

Layers that read a row from its left (gated delta net, short convolution, Mamba) would mix the sequences of a row. So in
Qwen3-Next, Qwen3.5, Qwen3.5-MoE, LFM2, Granite 4, Jamba, Falcon-H1 and OLMo hybrid these layers get a row for each
sequence, its prompt before it, beside sequences of like length (`ops/recurrent_layers.py`). All other layers compute
packed rows, and a shared prompt once. A run says so ("packing of sequences"), and why if a model's layers cannot be
reached: then each of its sequences has a row of its own in all layers.

bf16 rounds to 8 bits, so the engine's batches and the trainer's differ by more. A run stops when the mean difference of
a batch is above [`train.max_logprob_gap`](spec.md); by default that is 0.05 nats or three times the first batch's
difference, whichever is more. The column uses 0.05; the families here differ by less than 0.01.

Packed and single sequences have the same gradient: the difference's norm is at most 1e-5 of the whole gradient's
(2.2e-6 at most in the hybrids here), and of each tensor at most 1e-5 of 1 + its norm. The decay of gated delta nets
(Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo hybrid) may differ by 1e-4, because float32 rounds its gradient more coarsely:
with published heads (128) its few numbers differ by 2.3e-5. That is rounding alone: in float64 throughout, those of
Qwen3.5 agree within 4e-14.

A family that is not here may work: `tandem model check MODEL` ([models.md](models.md#check-a-model-first)) says so of
one model, `tandem engine check --model MODEL` of one model in vLLM.

"""

VLLM = """
## In vLLM

These rows are measured apart (`python tests/families/family_vllm.py --python INTERPRETER`), for a vLLM is no part of
the suite's environment. Each is `tandem engine check --model` of the family's tiny model: a version is published as it
was loaded and one with weights moved, over one bridge, with a run's proofs; then vLLM answers eight prompts twice.
**yes** means that the mean difference to the trainer's logprobs is within the check's limit in each of 16 answers; the
number beside it is the largest, in nats a token. On a CPU both compute in float32, on a GPU (H200) in bfloat16, where
random weights leave a larger difference than trained ones do. Gated delta nets (Qwen3-Next, Qwen3.5, Qwen3.5-MoE) are
computed in bfloat16 on a CPU, too, as vLLM can no other way, and on the GPU with `engine.arguments =
["--gdn-prefill-backend", "triton"]`: vLLM's choice there needs flashinfer, which that machine lacked.

Layers are read from vLLM's classes (`vllm_worker/layer_readers.py`); what is not known is refused, and nothing is
served. Experts, gated delta nets, Mamba layers and short convolutions are known for one worker, not for
`engine.tensor_parallel` above 1. vLLM keeps a Mamba layer's decay as `-exp(A_log)`, and a gated delta net's `A_log` in
32 bits: such models take versions over `disk`, not over `shared`, and no adapters. On a CPU, vLLM computes Mamba's
first kind not at all; its log says so. A few families have other sizes on the GPU, which its kernels or vLLM 0.26 need.
Adapters are on all linear layers of a family, or on those that the check or a refusal names where vLLM does not serve
all: a number behind the difference says which. Empty cells were not measured.

"""


def page() -> str:
    """Return docs/families.md."""
    refusals: dict[str, int] = {}

    def cell(told: str) -> str:
        if told in ("yes", TEXT_ONLY):
            return told
        return f"[{refusals.setdefault(told, len(refusals) + 1)}](#refusals)"

    lines = [f"| family | models | {' | '.join(CELLS)} |", f"|---|---|{'---|' * len(CELLS)}"]
    for name, family in FAMILIES.items():
        lines.append(f"| {name} | {family.models} | {' | '.join(map(cell, outcomes(name).values()))} |")
    lines += ["", *_in_vllm(cell)]
    lines += ["", "## Refusals", "", "| | what Tandem says, or vLLM |", "|---|---|"]
    lines += [f"| {number} | {text.replace('|', '/')} |" for text, number in refusals.items()]
    return HEAD.format(version=transformers.__version__) + "\n".join(lines) + "\n"


def _in_vllm(cell: Callable[[str], str]) -> list[str]:
    found = {(each["family"], each["device"], each["bridge"]): each for each in family_vllm.rows()}
    columns = sorted({(device, bridge) for _, device, bridge in found})
    versions = {device: "/".join(sorted({e["vllm"] for e in found.values() if e["device"] == device} - {""}))
                for device, _ in columns}  # fmt: skip
    titles = [f"{'GPU' if device == 'cuda' else 'CPU'}, {bridge}, {versions[device]}" for device, bridge in columns]
    lines = [*VLLM.strip("\n").split("\n"), "", f"| family | {' | '.join(titles)} |", f"|---|{'---|' * len(columns)}"]
    for name in FAMILIES:
        rows = [found.get((name, *column)) for column in columns]
        told = [
            ""
            if each is None
            else ", ".join(
                [cell(each["told"])]
                + ([f"{each['gap']:g}"] if "gap" in each else [])
                + ([cell(f"adapters on {', '.join(each['targets'])} alone")] if "targets" in each else [])
            )
            for each in rows
        ]
        if any(told):
            lines.append(f"| {name} | {' | '.join(told)} |")
    return lines
