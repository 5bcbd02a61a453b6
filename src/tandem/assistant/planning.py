"""Plan a spec for an assistant.

`python -m tandem.assistant.planning` takes the question as JSON on stdin and prints the answer as JSON: for a control
server, which must not import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandem.assistant.reading import MOST_BYTES
from tandem.assistant.spending import Estimate
from tandem.errors import TandemError
from tandem.recipes.plan_run import plan_run
from tandem.runs.planner.plan_text import plan_text
from tandem.spec.load import parse_spec


def estimate(spec: Mapping[str, Any], gpu: str, prompt_tokens: int, row_tokens: int) -> Estimate:
    planned = plan_run(parse_spec(spec), gpu=gpu, prompt_tokens=prompt_tokens, row_tokens=row_tokens)
    seconds = float(planned.as_json()["times"]["steps_s"])
    said = f"{planned.peak_gib:.1f} GiB, {seconds:,.0f} s of steps{'' if planned.fits else '; it does not fit'}"
    return Estimate(planned.fits, plan_text(planned)[: MOST_BYTES // 2], said)


def main() -> None:
    try:
        answer = asdict(estimate(**json.load(sys.stdin)))
    except TandemError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
