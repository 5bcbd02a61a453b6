"""A taskset of verifiers, as somebody's package would hold it: one question, one answer, several rewards."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int
    kind: str = "plain"


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        if task.kind == "crash":
            raise RuntimeError("no answer key")
        return float(trace.last_reply.strip() == str(task.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 24
    kind: str = "plain"
    split: str = "train"


class Sums(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        first = 1_000 if self.config.split == "test" else 0
        for number in range(first, first + self.config.count):
            prompt = None if self.config.kind == "silent" else f"{number}+{number}?"
            system = None if self.config.kind == "silent" else "Add."
            data = SumData(
                name=f"sum {number}", prompt=prompt, system_prompt=system, answer=2 * number, kind=self.config.kind
            )
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]
