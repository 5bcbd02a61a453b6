"""Measure the lengths of a run's rows or prompts for its plan.

Only the first rows of a large data set are read, so that a plan takes seconds. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from tandem.build import standalone_engines, training
from tandem.data.conversation import Conversation
from tandem.data.preference_pairs import Pair
from tandem.data.rated_answers import Rated, RatedAnswer
from tandem.env.load import ADAPTERS
from tandem.env.protocol_check import their_code
from tandem.errors import DataError, ImageError, SpecError, TandemError, TemplateError
from tandem.ops.row_packing import common_prefix
from tandem.protocols import Environment
from tandem.rollout.recorded_producer import record, record_answer, record_pair
from tandem.runs.planner.lengths import Lengths, RecordedGroup
from tandem.spec.data import DatasetData
from tandem.spec.environment import PROMPTS
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec, SftSpec
from tandem.types import Group, Message, text_of

_ROWS, _CHARACTERS, _PROMPTS = 2000, 4_000_000, 256
"""Most rows, characters and prompts to read."""
R = TypeVar("R")


def read_lengths(
    spec: RunSpec, context: int, environment: Environment | None = None, *, in_a_run: bool = False
) -> Lengths:
    """Return the lengths of a run's rows or prompts, or no lengths with the reason.

    `context`: most tokens of a sequence of the model; 0: not known. `in_a_run`: the run uses the data and `environment`
    anyway. Otherwise no data set is downloaded, and no environment is loaded that starts processes or downloads
    something.
    """
    try:
        if isinstance(spec, RlSpec):
            return _prompt_lengths(spec, environment or _environment(spec))
        return _row_lengths(spec, context, download=in_a_run)
    except TandemError as error:
        return Lengths(f"lengths are assumed, because none could be read: {error}")


def _row_lengths(spec: SftSpec | PreferenceSpec, context: int, *, download: bool) -> Lengths:
    """Return the lengths of recorded conversations or pairs."""
    data = spec.data
    if isinstance(data, DatasetData) and not download and not Path(data.name).exists():
        raise DataError(f"data.name = '{data.name}' is not on this machine")
    held_out = "eval_split" if isinstance(data, DatasetData) else "eval_path"
    bounds = {"max_examples": min(data.max_examples or _ROWS, _ROWS), "allow_bad_rows": True, held_out: ""}
    share = 0.0 if getattr(data, held_out) else data.eval_share
    bounded = data.model_copy(update={**bounds, "eval_share": share})
    most = min(data.max_tokens or 2**31, context or 2**31)
    renderer = standalone_engines.renderer(spec.model)

    def example(row: Conversation) -> Group:
        return [record(renderer, row.messages, "")]

    def pair(row: Pair) -> Group:
        return record_pair(renderer, row.prompt, row.chosen, row.rejected, "")

    def answer(both: tuple[Rated, RatedAnswer]) -> Group:
        return [record_answer(renderer, both[0].prompt, both[1].messages, 1.0, "")]

    if isinstance(spec, PreferenceSpec) and spec.algorithm.kind == "kto":
        rated = training.rated(bounded, "data")
        answers = [(row, each) for row in rated.train for each in row.answers]
        read, groups = rated.report.read, _measured(answers, answer, most)
    elif isinstance(spec, PreferenceSpec):
        pairs = training.pairs(bounded, "data")
        read, groups = pairs.report.read, _measured(pairs.train, pair, most)
    else:
        rows = training.rows(bounded, "data", _as_text)
        read, groups = rows.report.read, _measured(rows.train, example, most)
    if not groups:
        raise DataError(f"data: no row has at most {most:,} tokens")
    lengths = [length for group in groups for length in group.lengths]
    trained = fmean(count for group in groups for count in group.trained)
    what = f"{'the first ' if read == _ROWS else ''}{read:,} rows were read"
    text = f"{what}: sequences have {min(lengths):,} to {max(lengths):,} tokens, {fmean(lengths):,.0f} on average, of "
    return Lengths(f"{text}which {trained:,.0f} are trained on", groups=groups)


def _measured(rows: Sequence[R], to_group: Callable[[R], Group], most: int) -> list[RecordedGroup]:
    """Return the token counts of rows, without the rows that the run would drop."""
    found: list[RecordedGroup] = []
    characters = 0
    for row in rows:
        try:
            group = to_group(row)
        except (TemplateError, ImageError):
            continue
        lengths = tuple(len(each.ids) for each in group)
        if max(lengths) > most:
            continue
        trained = tuple(sum(each.trained) for each in group)
        first = min(each.trained.index(True) for each in group)
        found.append(RecordedGroup(lengths, trained, common_prefix([each.ids[:first] for each in group])))
        characters += sum(len(str(message.get("content"))) for each in group for message in each.messages)
        if characters > _CHARACTERS:
            break
    return found


def _environment(spec: RlSpec) -> Environment:
    """Load the environment, unless loading it would start processes or download something."""
    environment_spec = training.its_spec(spec)
    name = environment_spec.name
    if name == PROMPTS and environment_spec.sandbox == "off" and _is_here(environment_spec.params.get("data")):
        return training.environment(environment_spec.model_copy(update={"workers": 0}))
    if environment_spec.workers or name.partition(":")[0] in ADAPTERS:
        raise SpecError(f"environment.name = '{name}': is not loaded for a plan; give --prompt-tokens")
    return training.environment(environment_spec)


def _is_here(data: Any) -> bool:
    """Return whether the data of `prompts` is a file or directory of this machine, which needs no download."""
    named = data.get("path", data.get("name")) if isinstance(data, dict) else data
    return isinstance(named, str) and Path(named).exists()


def _prompt_lengths(spec: RlSpec, environment: Environment) -> Lengths:
    """Return the prompt lengths of tasks spread evenly over the training split."""
    with their_code(training.its_spec(spec).name, "tasks('train')"):
        tasks = environment.tasks("train")
        step = max(1, len(tasks) // _PROMPTS)
        chosen = [tasks[index] for index in range(0, len(tasks), step)]
    renderer = standalone_engines.renderer(spec.model)
    return Lengths("", prompts=[len(renderer.prompt(_as_text(task.messages))) for task in chosen])


def _as_text(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with a few letters for each image, whose tokens only the model's processor knows."""
    return tuple({**message, "content": text_of(message.get("content"))} for message in messages)
