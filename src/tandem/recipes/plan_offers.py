"""Plan a spec for what a target offers: the one place that does so for a control plane, its clients and assistants.

A control plane plans in a child process: the planner imports torch, which would hold up every other request, and a spec
of another may be slow to plan.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib

from tandem.errors import TandemError
from tandem.runs.planner.calibration import card_within, known
from tandem.serve.http.refusals import RequestRefused
from tandem.shapes.plans import Estimate, PlanBody, PlanInfo
from tandem.shapes.runs import OfferInfo, TargetInfo
from tandem.spec.load import parse_spec
from tandem.spec.run import RunSpec

DEADLINE_S = 120.0
_AT_A_TIME, _MOST_WAITING = 1, 16


def plan_offers(body: PlanBody, target: TargetInfo) -> PlanInfo:
    """Return the plan for each offer of a target; for the spec's own device where there is none."""
    spec = parse_spec(tomllib.loads(body.spec_toml))
    offers: list[OfferInfo | None] = [*target.offers] if target.offers and not body.gpu else [None]
    estimates = [_estimate(spec, body, each) for each in offers]
    costs = [each.cost_usd for each in estimates if each.fits and each.offer is not None]
    return PlanInfo(
        target=target.name, kind=target.kind, error=target.error, estimates=estimates,
        cost_low_usd=min(costs, default=0.0), cost_high_usd=max(costs, default=0.0),
        local_files=() if target.kind == "local" else tuple(sorted(set(spec.local_files()))),
    )  # fmt: skip


def _estimate(spec: RunSpec, body: PlanBody, offer: OfferInfo | None) -> Estimate:
    gpu = body.gpu
    if offer is not None and not (gpu := card_within(offer.gpu) if offer.gpus else "cpu"):
        return Estimate(offer=offer, why_not=f"the planner knows {', '.join(known())}, not '{offer.gpu}'")
    try:
        from tandem.recipes.plan_run import plan_run
        from tandem.runs.planner.plan_text import plan_text

        planned = plan_run(spec, gpu=gpu, prompt_tokens=body.prompt_tokens, row_tokens=body.row_tokens)
    except (TandemError, ModuleNotFoundError) as error:
        return Estimate(offer=offer, gpu=gpu, why_not=str(error))
    seconds = float(planned.as_json()["times"]["steps_s"])
    hosts = max(1, spec.parallel.hosts)
    usd = seconds / 3600 * hosts * offer.usd_per_hour if offer is not None else planned.usd or 0.0
    return Estimate(
        offer=offer, gpu=planned.gpu, fits=planned.fits, memory_gib=planned.peak_gib, seconds=seconds, cost_usd=usd,
        text=plan_text(planned),
    )  # fmt: skip


class ChildPlanner:
    """Plans in child processes, one at a time.

    consumes: plans to make   waits for: the child before   produces: plans, or 503 after `deadline_s`
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._slots, self._waiting, self._deadline_s = asyncio.Semaphore(_AT_A_TIME), 0, deadline_s

    async def __call__(self, body: PlanBody, target: TargetInfo) -> PlanInfo:
        if self._waiting >= _MOST_WAITING:
            raise RequestRefused(429, f"{self._waiting} plans are waiting; send it again", retry_after_s=5.0)
        self._waiting += 1
        try:
            async with self._slots:
                return await self._planned(body, target)
        finally:
            self._waiting -= 1

    async def _planned(self, body: PlanBody, target: TargetInfo) -> PlanInfo:
        content = json.dumps([body.model_dump(mode="json"), target.model_dump(mode="json")]).encode()
        pipe = asyncio.subprocess.PIPE
        # a plan downloads nothing
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, stderr=pipe,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._deadline_s):
                told, errors = await child.communicate(content)
        except TimeoutError:
            raise RequestRefused(503, f"the plan was not made within {self._deadline_s:g} s; send it again") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise RequestRefused(503, f"the planner ended with {child.returncode}: {' '.join(last)[:300]}")
        return PlanInfo.model_validate_json(told)


def main() -> None:
    """Read a plan to make from stdin, and write it to stdout."""
    body, target = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no part of the answer
    plan = plan_offers(PlanBody.model_validate(body), TargetInfo.model_validate(target))
    out.write(plan.model_dump_json())
    out.flush()


if __name__ == "__main__":
    main()
