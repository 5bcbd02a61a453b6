"""A plan as text."""

from __future__ import annotations

from tandem.runs.planner.plan import Plan


def plan_text(plan: Plan) -> str:
    lines = [
        f"{plan.gpu}: {plan.memory_gib:.1f} GiB, of which {plan.limit_gib:.1f} may be used; the run needs "
        f"{plan.peak_gib:.2f} GiB: {'it fits' if plan.fits else 'it does NOT fit'}",
        "",
        "parameters   " + ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items() if count),
        f"bridge       {plan.bridge}: {plan.why_bridge}",
        f"a step       {plan.work.sequences} sequences, about {plan.work.step_tokens:,.0f} tokens, in "
        f"{plan.work.num_micro} of at most {plan.work.micro.tokens:,}",
        f"at most      train.micro_tokens = {plan.largest_micro_tokens:,}; {plan.largest_cache_gib:.1f} GiB for keys "
        "and values",
        f"checkpoints  {plan.checkpoint_gib:.2f} GiB of the disk each, and {plan.copied_gib:.2f} of the host's memory",
        "",
        f"{'phase':<10}{'peak GiB':>9}   parts, GiB (not all at once)",
    ]
    for phase in plan.phases:
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in phase.parts.items() if gib >= 0.005)
        lines.append(f"{phase.name:<10}{phase.peak_gib:>9.2f}   {parts}")
    took = plan.times
    lines += [
        "",
        f"a step       {took.step_s:.2f} s: rollouts {took.rollout_s:.2f}, training {took.train_s:.2f}, sync "
        f"{took.sync_s:.2f}; {took.tokens_per_s:,.0f} tokens/s",
        f"all steps    {took.steps_s / 60:.1f} min, {plan.usd:.2f} USD; loading and evaluations come on top",
    ]
    lines += ["", "what would change that:", *(f"  {each}" for each in plan.changes)] if plan.changes else []
    lines += ["", "what would make it faster:", *(f"  {each}" for each in plan.faster)] if plan.faster else []
    if not plan.fits and not plan.changes:
        lines += ["", "no single setting makes it smaller; take a smaller model, [model.lora], or a larger GPU"]
    return "\n".join([*lines, "", "assumed:", *(f"  {each}" for each in plan.assumed)])
