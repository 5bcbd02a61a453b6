"""Checks of what callers send to the rollout queue, and the errors that refuse it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tandem.errors import Conflict, GroupRefused, NotKnown, QueueFull, Starved
from tandem.rollout.queue.state import EnvironmentState, QueueEntry, QueueState
from tandem.rollout.queue.types import QueueLimits, RegisteredEnvironment, TrainerSpec
from tandem.rollout.wire.codec import Rules, WireGroup, check
from tandem.rollout.wire.validation import check_plain

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REASON = re.compile(r"[a-z0-9][a-z0-9_./-]{0,63}")


def check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "use 1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        raise GroupRefused(field, f"{name[:128]!r} is not allowed: {rule}")


def check_reason(reason: str) -> str:
    if not _REASON.fullmatch(reason):
        raise GroupRefused("reason", "use 1 to 64 of a-z, digits, '_', '.', '/' and '-': drops are counted by it")
    return reason


def check_trainer(spec: TrainerSpec) -> None:
    check_name("run_id", spec.run_id)
    counted = bool(spec.groups_per_step), bool(spec.sequences_per_step)
    if counted not in ((True, False), (False, True)):
        raise GroupRefused("groups_per_step", "a step is counted in groups or in sequences: set one of the two")
    for field in ("groups_per_step", "sequences_per_step", "version", "num_ids", "max_tokens", "max_dropped"):
        if getattr(spec, field) < 0:
            raise GroupRefused(field, f"{getattr(spec, field)}: must be 0 or above")
    if spec.max_lag < -1:
        raise GroupRefused("max_lag", f"{spec.max_lag}: must be 0 or above, or -1 for no bound")
    if spec.groups_per_step and spec.max_lag < 0:
        raise GroupRefused(
            "max_lag", "-1 with groups_per_step: slots are (max_lag + 1) * groups_per_step; set 0 or above"
        )
    if spec.slots < 0 or spec.slots > 1_000_000:
        raise GroupRefused("max_lag", f"(max_lag + 1) * groups_per_step = {spec.slots} slots: must be 1 to 1000000")
    check_plain(spec.extra, "extra")
    if not 1 <= spec.lease_s <= 86400:
        raise GroupRefused("lease_s", f"{spec.lease_s:g}: must be 1 to 86400 seconds")


def check_left(state: QueueState, now: float, waiting: bool) -> None:
    """Raise Conflict while the registered trainer waits for groups (`waiting`) or holds some under lease."""
    current = state.trainer
    if current is None or "atropos" in current.extra:  # an Atropos lease lasts for a day even if its trainer is gone
        return
    left_s = min(current.lease_s, max([lease.expires - now for lease in state.leases.values()], default=0.0))
    if waiting or left_s > 0:
        does = "waits for groups" if waiting else f"holds groups under lease for another {math.ceil(left_s)} s"
        raise Conflict(
            f"run '{current.run_id}' is registered and {does}; end that run, and register once its lease has lapsed",
            field="run_id",
        )


def check_environment(
    spec: RegisteredEnvironment, trainer: TrainerSpec | None, known: Iterable[EnvironmentState], limits: QueueLimits
) -> None:
    check_name("name", spec.name)
    if trainer is None:
        raise Conflict("no trainer has registered yet; try again once one has")
    if not (math.isfinite(spec.weight) and 1e-3 <= spec.weight <= 1e3):
        raise GroupRefused("weight", f"{spec.weight}: must be 0.001 to 1000")
    if not 0 <= spec.min_share <= 1:
        raise GroupRefused("min_share", f"{spec.min_share}: must be 0 to 1")
    if spec.group_size < 0 or spec.max_tokens < 0:
        raise GroupRefused("group_size" if spec.group_size < 0 else "max_tokens", "must be 0 or above")
    check_plain(spec.extra, "extra")
    if not 1 <= spec.lapse_s <= 86400:
        raise GroupRefused("lapse_s", f"{spec.lapse_s}: must be 1 to 86400 seconds")
    if spec.tokenizer and trainer.tokenizer and spec.tokenizer != trainer.tokenizer:
        raise GroupRefused("tokenizer", f"{spec.tokenizer}: the trainer's is {trainer.tokenizer}; ids differ")
    live = [each for each in known if each.live]
    if (shares := sum(each.spec.min_share for each in live) + spec.min_share) > 1 + 1e-9:
        raise Conflict(
            f"min_share {spec.min_share:g} does not fit: all min_share together would be {shares:g}, above 1",
            field="min_share",
        )
    if len(live) >= limits.max_environments:
        raise QueueFull(f"{len(live)} environments are registered, and that is the limit")


def check_take(trainer: TrainerSpec, count: int, sequences: int) -> None:
    if (count > 0) == (sequences > 0):
        raise GroupRefused("groups", "set groups or sequences, one of the two, above 0")
    if trainer.slots and sequences:
        raise GroupRefused("sequences", "this trainer registered groups_per_step: set groups instead")
    if trainer.slots and count > trainer.slots:
        raise GroupRefused("groups", f"take({count}) can never succeed: there are only {trainer.slots} slots")
    if max(count, sequences) > 2**16:
        raise GroupRefused("groups" if count else "sequences", f"at most {2**16} in one call")


def why_no_batch(state: QueueState) -> str:
    """Say why no batch of `sequences_per_step` can be made of the group sizes seen so far; empty if one can."""
    wanted = state.trainer.sequences_per_step if state.trainer else 0
    declared = {each.declared_size for each in state.environments.values() if each.live}
    sizes = sorted((declared | {entry.size for entry in state.entries.values()}) - {0})
    if not wanted or not sizes:
        return ""
    sums = 1  # bit n: groups of these sizes add up to n
    for size in sizes:
        step = size
        while step <= wanted + sizes[-1]:
            sums |= sums << step
            step *= 2
    if sums >> wanted & 1:
        return ""
    below = next(n for n in range(wanted, -1, -1) if sums >> n & 1)
    above = next(n for n in range(wanted, wanted + sizes[-1] + 1) if sums >> n & 1)
    sizes_that_do = f"{below} or {above}" if below else f"{above}"
    return (
        f"no batch of exactly {wanted} sequences (batch_size) can be made: groups of {', '.join(map(str, sizes))} "
        f"sequences never add up to it; register the trainer with batch_size = {sizes_that_do}, or "
        "start environments with another group_size"
    )


def check_ticket(state: QueueState, environment: int, ticket: int, field: str = "ticket") -> QueueEntry:
    """Return the entry of a ticket whose group has not arrived; Conflict for any other ticket."""
    entry = state.playing.get(ticket)
    if entry is None or entry.environment != environment:
        raise Conflict(
            f"ticket {ticket} of environment {environment} is not being played: its group was put or dropped before, "
            "or the ticket lapsed",
            field=field,
        )
    if entry.writing:
        raise Conflict(f"another request is putting or dropping ticket {ticket} now", field=field)
    return entry


def check_groups(
    groups: Sequence[WireGroup], environment: int | None, trainer: TrainerSpec, state: QueueState
) -> list[int]:
    """Return the environment of each group. The first group that breaks a rule refuses them all."""
    environments: list[int] = []
    tickets: set[int] = set()
    for number, group in enumerate(groups):
        field = f"groups.{number}"
        made_by = group.head.environment if group.head.environment is not None else environment
        if made_by is None or environment not in (None, made_by):
            raise GroupRefused(f"{field}.environment", "set it to the id that registration returned")
        each = state.environments.get(made_by)
        if each is None or not each.connected:
            raise NotKnown(
                f"environment {made_by} is not registered here; register it again", field=f"{field}.environment"
            )
        longest = [most for most in (trainer.max_tokens, each.spec.max_tokens) if most]
        check(group, Rules(trainer.num_ids, min(longest, default=0), each.spec.group_size), field)
        if trainer.sequences_per_step and group.size > trainer.sequences_per_step:
            raise GroupRefused(
                f"{field}.trajectories", f"{group.size} siblings never fit a batch of {trainer.sequences_per_step}"
            )
        if (ticket := group.head.ticket) is not None:
            check_ticket(state, made_by, ticket, f"{field}.ticket")
            if ticket in tickets:
                raise GroupRefused(f"{field}.ticket", f"ticket {ticket} appears twice in this post")
            tickets.add(ticket)
        environments.append(made_by)
    return environments


def check_starved(trainer: TrainerSpec, state: QueueState) -> None:
    if not trainer.max_dropped or state.dropped_in_a_row < trainer.max_dropped:
        return
    totals: Counter[str] = Counter()
    for each in state.environments.values():
        totals.update({reason: number for reason, number in each.counts.items() if reason != "put"})
    reasons = ", ".join(f"{number} {reason}" for reason, number in totals.most_common())
    raise Starved(
        f"store: {state.dropped_in_a_row} groups in a row had nothing to learn from (so far: {reasons}); "
        "make tasks easier or harder, warm up longer, raise train.group_size, or raise train.max_dropped"
    )
