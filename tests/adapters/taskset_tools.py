"""A taskset of verifiers whose task serves a tool, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


class ToolTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float("579" in trace.last_reply)

    @vf.metric
    async def answers_of_tools(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class WithTools(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ToolTask]:
        for number in range(16):
            yield ToolTask(vf.TaskData(name=f"tool-{number}", prompt=f"123+456 ({number})?"), self.config.task)


__all__ = ["WithTools"]

if __name__ == "__main__":
    Adder.run()
