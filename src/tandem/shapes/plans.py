"""What a spec needs on a target, before it is submitted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from tandem.shapes.base import Answer, Asked
from tandem.shapes.runs import OfferInfo

PROMPT_TOKENS, ROW_TOKENS = 64, 1024
"""Lengths that a plan takes where nothing was measured: of a prompt, and of a row of data."""
_Tokens = Annotated[int, Field(ge=1, le=10**7)]


class PlanBody(Asked):
    """A spec to plan for a target. Nothing is started, and no data and no code that the spec names is read."""

    spec_toml: str = Field(min_length=1, max_length=1_000_000)
    target: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    """A name of the server's file of targets."""
    gpu: str = Field(default="", max_length=100)
    """Plan for this card in place of the target's own."""
    prompt_tokens: _Tokens = PROMPT_TOKENS
    row_tokens: _Tokens = ROW_TOKENS


class Estimate(Answer):
    """The planner's estimate for one offer of a target; `why_not`: why there is none."""

    offer: OfferInfo | None = None
    """None: the target offers nothing now, or a card was named."""
    gpu: str = ""
    """The card of the estimate: one that the planner knows, or cpu."""
    fits: bool = False
    memory_gib: float = 0.0
    seconds: float = 0.0
    """Of all steps; loading and evaluations come on top."""
    cost_usd: float = 0.0
    """Of those seconds."""
    why_not: str = ""
    text: str = ""
    """The whole plan, as `tandem plan` prints it."""


class PlanInfo(Answer):
    target: str
    kind: str
    error: str = ""
    """Why the target does not answer now."""
    estimates: list[Estimate]
    cost_low_usd: float = 0.0
    """Of the cheapest offer that fits."""
    cost_high_usd: float = 0.0
    """Of the dearest offer that fits."""
    local_files: tuple[str, ...] = ()
    """Files that the spec names, and that the target's machine must have."""

    @property
    def best(self) -> Estimate | None:
        """The cheapest estimate that fits; else the first one that there is."""
        known = [each for each in self.estimates if not each.why_not]
        fitting = [each for each in known if each.fits]
        return min(fitting, key=lambda each: each.cost_usd) if fitting else (known[0] if known else None)
