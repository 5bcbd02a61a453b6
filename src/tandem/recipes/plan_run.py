"""Plan a run from its spec and data; at its start, save the plan and compare it with the free memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.build import built_model, planned_shape, sight
from tandem.build.this_machine import vllm_installed
from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.ops import release_host_memory
from tandem.protocols import Environment
from tandem.recipes.data_lengths import read_lengths
from tandem.runs.planner import plan as plans
from tandem.runs.planner.calibration import card_named, gpus_here, machine, ram_gib
from tandem.runs.planner.model_shape import NoPlan
from tandem.runs.planner.plan import Plan, kind_of
from tandem.runs.run import Run
from tandem.spec.hardware import Hardware, HardwareChoice
from tandem.spec.load import AnySpec, as_spec, parse_spec
from tandem.spec.model import PresetModel
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
    """Return the plan of a run, after measuring its rows or prompts unless `prompt_tokens` or `row_tokens` is given.
    `plan_run` in runs/planner/plan.py explains the other arguments."""
    spec = as_spec(spec)
    gpu, here_gib, unknown = (gpu, 0.0, "") if gpu else _this_card(spec)
    memory_gib = memory_gib or here_gib
    target = machine(gpu, memory_gib)
    there = Hardware("cuda" if target.on_gpu else "cpu", target.kind, target.memory_gib, vllm=vllm_installed())
    chosen: list[HardwareChoice] = []
    if not in_a_run:
        spec, chosen = sight.choose(spec, there)
    elif target.on_gpu and not isinstance(spec.model, PresetModel):
        # What was chosen when the run began counts as left out since; on other numbers of ranks it is as it is here.
        spec = parse_spec(spec.model_dump(mode="json", exclude_none=True))
    shape = planned_shape.of_run(spec, on_gpu=target.on_gpu)
    lengths_given = prompt_tokens or row_tokens
    planned = plans.plan_run(
        spec,
        gpu=target.kind,
        prices=Path(prices) if prices else None,
        memory_gib=memory_gib,
        prompt_tokens=prompt_tokens,
        row_tokens=row_tokens,
        answer_tokens=answer_tokens,
        lengths=None if lengths_given else read_lengths(spec, shape.context, environment, in_a_run=in_a_run),
        shape=shape,
    )
    return replace(planned, chosen=chosen, assumed=[*([unknown] if unknown else []), *planned.assumed])


def _this_card(spec: RunSpec) -> tuple[str, float, str]:
    """Return the card to plan for where none was named, its GiB if it is here, and a line if its figures are another's.
    Without a GPU here, what the spec says."""
    kind = kind_of(spec)
    if kind == "cpu" or spec.profile != "auto":
        return kind, 0.0, ""
    if not (here := gpus_here()):
        return kind, 0.0, f"this machine has no GPU, so the plan is for '{kind}'; `--gpu cpu` plans for this machine"
    name, gib, _ = here[0]
    return (card, gib, "") if (card := card_named(name)) else (kind, gib, _unknown(name, kind))


def _unknown(name: str, kind: str) -> str:
    return f"'{name}' is not in cards.toml: its memory is known, and the seconds are those of '{kind}'"


def keep_plan(spec: RunSpec, run: Run, environment: Environment | None = None) -> Plan | None:
    """Write plan.json and return the plan; None if the planner does not know the model. SpecError if the run cannot fit
    with any number of tokens per step. If only the largest micro-batch would not fit, report it (refuse it under
    `strict`)."""
    kind, total_gib, free_gib = live_memory(spec)
    if kind != "cpu" and not card_named(name := _card_name(spec)):
        run.warn(f"the plan: {_unknown(name, kind)}")
    try:
        plan = plan_run(spec, gpu=kind, memory_gib=total_gib, environment=environment, in_a_run=True)
    except NoPlan as error:
        run.event("plan", why_not=str(error))
        return None
    content = {**plan.as_json(), "free_gib": free_gib, "before_gib": release_host_memory.peak_bytes() / _GIB}
    atomic_write.write_json(run.directory / "plan.json", content)
    run.event("plan", gpu=kind, peak_gib=plan.peak_gib, least_gib=plan.least_gib, free_gib=free_gib)
    if plan.least_gib > free_gib:
        raise SpecError(
            f"the run needs at least {plan.least_gib:.2f} GiB, but only {free_gib:.2f} GiB of this "
            f"{'machine' if kind == 'cpu' else 'GPU'} are free; {_way_out(plan)}"
        )
    if plan.peak_gib > free_gib:
        worst = f"the largest micro-batch needs {plan.peak_gib:.2f} GiB, but only {free_gib:.2f} GiB are free"
        run.note_option("the plan", f"{free_gib:.2f} GiB", False, f"{worst}; {_way_out(plan)}")
    return plan


def live_memory(spec: RunSpec) -> tuple[str, float, float]:
    """Return the device kind to plan for, its total and its free GiB; on a CPU this process's memory counts as free."""
    device = built_model.pick_device(spec.device)
    if device.type == "cpu":
        return ("cpu", *ram_gib())
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return card_named(_card_name(spec)) or "h200", total / _GIB, free / _GIB


def _card_name(spec: RunSpec) -> str:
    import torch

    return torch.cuda.get_device_name(built_model.pick_device(spec.device))


def _way_out(plan: Plan) -> str:
    ranks = [f"--set parallel.ranks={count}: {gib:.2f} GiB of each GPU" for count, gib in plan.ranks_that_fit.items()]
    if ways := [*plan.changes[-2:], *ranks]:
        return "try " + "; ".join(ways)
    largest = plan.largest_micro_tokens
    return f"`tandem plan` shows the phases; on an empty device train.micro_tokens = {largest:,} is the most that fits"
