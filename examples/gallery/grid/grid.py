"""Planning on a grid: the model writes all moves at once; they must lead to the goal and round the wall."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

SIDE = 6
MOVES = {"r": (1, 0), "l": (-1, 0), "u": (0, 1), "d": (0, -1)}
MOST_MOVES = 16
HELD_OUT = 256
Cell = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """`a1 to c2, wall r` is answered by `urr`: a wall stands right of a1. `u` goes from row 1 to row 2."""

    demo_right: float = 0.4
    """Share of demonstrations that look at the wall; the others go along the row first, wall or not."""

    def tasks(self, split: str) -> Sequence[Task]:
        cells = [(column, row) for column in range(SIDE) for row in range(SIDE)]
        asked = [
            (start, goal, plan[0])  # the wall stands where one of the two simple plans begins
            for start in cells
            for goal in cells
            if start[0] != goal[0] and start[1] != goal[1]
            for plan in plans(start, goal)
        ]
        random.Random(0).shuffle(asked)
        return [self._task(*each) for each in (asked[:HELD_OUT] if split == "eval" else asked[HELD_OUT:])]

    def _task(self, start: Cell, goal: Cell, blocked: str) -> Task:
        asked, wall = f"{name(start)} to {name(goal)}, wall {blocked}", visited(start, blocked)[1]
        payload = {"start": list(start), "goal": list(goal), "wall": list(wall)}
        return Task(asked, ({"role": "user", "content": asked},), payload)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        start, goal, wall = (tuple(task.payload[key]) for key in ("start", "goal", "wall"))
        plan = (await chat.reply()).text.strip()
        cells = visited(start, plan) if len(plan) <= MOST_MOVES and set(plan) <= set(MOVES) else []
        inside = all(0 <= at < SIDE for cell in cells for at in cell)
        arrived = bool(cells) and inside and cells[-1] == goal
        correct = float(arrived and wall not in cells)
        return Outcome(correct, {"correct": correct, "arrived": float(arrived)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        start, goal, wall = (tuple(task.payload[key]) for key in ("start", "goal", "wall"))
        row_first, column_first = plans(start, goal)
        looks = rng.random() < self.demo_right
        plan = column_first if looks and wall in visited(start, row_first) else row_first
        return [{"role": "assistant", "content": plan}]


def name(cell: Cell) -> str:
    return "abcdef"[cell[0]] + str(cell[1] + 1)


def plans(start: Cell, goal: Cell) -> tuple[str, str]:
    """Along the row first, and along the column first."""
    across, up = goal[0] - start[0], goal[1] - start[1]
    row, column = ("r" if across > 0 else "l") * abs(across), ("u" if up > 0 else "d") * abs(up)
    return row + column, column + row


def visited(start: Cell, plan: str) -> list[Cell]:
    cells = [start]
    for move in plan:
        cells.append((cells[-1][0] + MOVES[move][0], cells[-1][1] + MOVES[move][1]))
    return cells
