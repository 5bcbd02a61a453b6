"""docs/families.md: what the suite found, as a table. `python docs/make_families.py` writes it."""

from __future__ import annotations

import transformers
from family_suite import CELLS, FAMILIES, TEXT_ONLY, outcomes

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
Qwen3-Next, Qwen3.5, Qwen3.5-MoE, LFM2, Granite 4, Jamba, Falcon-H1 and OLMo hybrid each sequence has a row of its own,
beside sequences of like length: packed batches give the results of single sequences, with about a fifth of padding on
instruction data. The varlen arguments of their GPU kernels (`cu_seqlens`, `seq_idx`) are not used.

bf16 rounds to 8 bits, so the engine's batches and the trainer's differ by more. A run stops when the mean difference of
a batch is above [`train.max_logprob_gap`](spec.md); by default that is 0.05 nats or three times the first batch's
difference, whichever is more. The column uses 0.05; the families here differ by less than 0.01.

Gradients are compared tensor by tensor: the difference's norm is at most 1e-5 of 1 + the tensor's norm. For gated delta
nets (Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo hybrid) it is at most 1e-4, because float32 rounds the gradient of their
decay more coarsely (1.4e-5 in Qwen3.5). That is rounding alone: computed in float64 throughout, packed and single
sequences of Qwen3.5 agree within 4e-14.

A family that is not here may work: `tandem model check MODEL` ([models.md](models.md#check-a-model-first)) says so of
one model. vLLM is not part of the suite; `tandem engine check --model MODEL` compares it.

"""


def page() -> str:
    """Return docs/families.md."""
    refusals: dict[str, int] = {}
    lines = [f"| family | models | {' | '.join(CELLS)} |", f"|---|---|{'---|' * len(CELLS)}"]
    for name, family in FAMILIES.items():
        told = [
            each if each in ("yes", TEXT_ONLY) else f"[{refusals.setdefault(each, len(refusals) + 1)}](#refusals)"
            for each in outcomes(name).values()
        ]
        lines.append(f"| {name} | {family.models} | {' | '.join(told)} |")
    notes = ["", "## Refusals", "", "| | what Tandem says |", "|---|---|"]
    notes += [f"| {number} | {text.replace('|', '/')} |" for text, number in refusals.items()]
    return HEAD.format(version=transformers.__version__) + "\n".join([*lines, *notes]) + "\n"
