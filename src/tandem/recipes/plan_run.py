"""The plan of a run that is about to start: kept in it, and held against the memory that is really free."""

from __future__ import annotations

from pathlib import Path

from tandem.build import training
from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.ops import release_host_memory
from tandem.protocols import Environment
from tandem.recipes.data_lengths import read_lengths
from tandem.runs.planner import plan as plans
from tandem.runs.planner.calibration import known, ram_gib
from tandem.runs.planner.model_shape import NoPlan
from tandem.runs.planner.plan import Plan
from tandem.runs.run import Run
from tandem.spec.load import AnySpec, as_spec
from tandem.spec.run import RunSpec

_GIB = 2**30


def plan_run(
    spec: AnySpec,
    *,
    gpu: str = "",
    prices: str | Path | None = None,
    memory_gib: float = 0.0,
    prompt_tokens: int = 0,
    row_tokens: int = 0,
    answer_tokens: float = 0.0,
    environment: Environment | None = None,
    in_a_run: bool = False,
) -> Plan:
    """Return the plan of a run, whose rows or prompts are read first; lengths that are told are not read. What `gpu`
    and the numbers mean: `plan_run` in runs/planner/plan.py."""
    spec = as_spec(spec)
    told = prompt_tokens or row_tokens
    return plans.plan_run(
        spec,
        gpu=gpu,
        prices=Path(prices) if prices else None,
        memory_gib=memory_gib,
        prompt_tokens=prompt_tokens,
        row_tokens=row_tokens,
        answer_tokens=answer_tokens,
        lengths=None if told else read_lengths(spec, environment, in_a_run=in_a_run),
    )


def keep_plan(spec: RunSpec, run: Run, environment: Environment | None = None) -> Plan | None:
    """Writes plan.json; returns the plan, if there is one. Refuses what cannot fit whatever a step's tokens are; what
    would not fit in the worst case is said, and refused under `strict`."""
    kind, total_gib, free_gib = live_memory(spec)
    try:
        plan = plan_run(spec, gpu=kind, memory_gib=total_gib, environment=environment, in_a_run=True)
    except NoPlan as error:
        run.event("plan", why_not=str(error))
        return None
    kept = {**plan.as_json(), "free_gib": free_gib, "before_gib": release_host_memory.peak_bytes() / _GIB}
    atomic_write.write_json(run.directory / "plan.json", kept)
    run.event("plan", gpu=kind, peak_gib=plan.peak_gib, least_gib=plan.least_gib, free_gib=free_gib)
    if plan.least_gib > free_gib:
        raise SpecError(
            f"the run takes at least {plan.least_gib:.2f} GiB, and {free_gib:.2f} GiB of this "
            f"{'machine' if kind == 'cpu' else 'GPU'} are free; {_way_out(plan)}"
        )
    if plan.peak_gib > free_gib:
        worst = f"the largest micro-batch takes it to {plan.peak_gib:.2f} GiB, and {free_gib:.2f} GiB are free"
        run.note_option("the plan", f"{free_gib:.2f} GiB", False, f"{worst}; {_way_out(plan)}")
    return plan


def live_memory(spec: RunSpec) -> tuple[str, float, float]:
    """Whose figures a plan goes by, GiB in all and GiB that are free; on a CPU this process' own count as free."""
    device = training.pick_device(spec.device)
    if device.type == "cpu":
        return ("cpu", *ram_gib())
    import torch

    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device).lower()
    return next((kind for kind in known() if kind in name), "h200"), total / _GIB, free / _GIB


def _way_out(plan: Plan) -> str:
    if plan.changes:
        return "try " + "; ".join(plan.changes[-2:])
    smaller = plan.largest_micro_tokens
    return f"`tandem plan` says where it goes; train.micro_tokens = {smaller:,} is the most for an empty one"
