"""A plan as text."""

from __future__ import annotations

from tandem.runs.planner.plan import MOST_RANKS, Plan
from tandem.spec.hardware import choices_text

_SHOWN = 8
"""Ranks whose memory is told."""


def plan_text(plan: Plan) -> str:
    each = plan.ranks > 1 and plan.gpu != "cpu"  # rank has a GPU of its own
    lines = [
        f"{f'{plan.ranks} x ' * each}{plan.gpu}: {plan.memory_gib:.1f} GiB{' each' * each}, of which "
        f"{plan.limit_gib:.1f} may be used; {'a rank' if each else 'the run'} needs {plan.peak_gib:.2f} GiB: "
        f"{'it fits' if plan.fits else 'it does NOT fit'}",
        *_ranks(plan),
        *choices_text(plan.chosen),
        "",
        "assumed:",
        *(f"  {each}" for each in plan.assumed),
        "",
        "parameters   " + ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items() if count),
        f"bridge       {plan.bridge}: {plan.why_bridge}",
        f"a step       {plan.work.sequences} sequences, about {plan.work.step_tokens:,.0f} tokens, in "
        f"{plan.work.num_micro} of at most {plan.work.micro.tokens:,}",
        f"at most      train.micro_tokens = {plan.largest_micro_tokens:,}; {plan.largest_cache_gib:.1f} GiB for keys "
        "and values",
        f"checkpoints  {plan.checkpoint_gib:.2f} GiB of the disk each, and {plan.copied_gib:.2f} of the host's memory",
        "",
        f"{'phase':<10}{'peak GiB':>9}   parts, GiB (not all at once){', of rank 0' * (plan.ranks > 1)}",
    ]
    for phase in plan.phases:
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in phase.parts.items() if gib >= 0.005)
        lines.append(f"{phase.name:<10}{phase.peak_gib:>9.2f}   {parts}")
    took = plan.times
    lines += [
        "",
        f"a step       {took.step_s:.2f} s: rollouts {took.rollout_s:.2f}, training {took.train_s:.2f}"
        f"{f', of which between ranks {_seconds(took.ranks_s)}' * (plan.ranks > 1)}, sync {_seconds(took.sync_s)}; "
        f"{took.tokens_per_s:,.0f} tokens/s",
        f"all steps    {took.steps_s / 60:.1f} min, {_price(plan)}; loading and evaluations come on top",
    ]
    if took.not_calibrated:
        lines.append(f"             without {' and '.join(took.not_calibrated)}: not calibrated on '{plan.gpu}'")
    lines += ["", "what would change that:", *(f"  {each}" for each in plan.changes)] if plan.changes else []
    lines += ["", "what would make it faster:", *(f"  {each}" for each in plan.faster)] if plan.faster else []
    if not plan.fits and not plan.changes:
        lines += ["", "no single setting makes it smaller; take a smaller model, [model.lora], or a larger GPU"]
    return "\n".join(lines)


def _ranks(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan.ranks > 1:
        gib = [f"{each:.2f}" for each in plan.ranks_gib]
        shown = ", ".join(gib) if len(gib) <= _SHOWN else f"{', '.join(gib[:_SHOWN])} ... {gib[-1]}"
        shared = "their processes share this host's memory" if plan.gpu == "cpu" else "each has its own GPU"
        lines.append(f"ranks        {plan.ranks}: {shown} GiB; {shared}")
    for ranks, gib_of_one in plan.ranks_that_fit.items():
        lines.append(f"GPUs         does not fit on {plan.ranks}, fits on {ranks} ({gib_of_one:.1f} GiB a rank)")
    if plan.why_no_ranks:
        lines.append(
            f"GPUs         does not fit on {plan.ranks}, nor on any number up to {MOST_RANKS}: {plan.why_no_ranks}"
        )
    return lines


def _price(plan: Plan) -> str:
    if plan.usd is None:
        return f"price of '{plan.gpu}' not known (--prices FILE has yours)"
    return f"{plan.usd:.2f} USD"


def _seconds(seconds: float | None) -> str:
    return "not calibrated" if seconds is None else f"{seconds:.2f}"
