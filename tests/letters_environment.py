"""An environment as a user writes it to a file: a model with random weights earns unequal rewards in it."""

LETTERS = """
from tandem.types import Outcome, Task

class Letters:
    def tasks(self, split):
        start = 0 if split == "train" else 100
        return [Task(f"{n}", ({"role": "user", "content": f"sing {n}"},)) for n in range(start, start + 20)]

    async def run(self, task, chat):
        return Outcome(len(set((await chat.reply()).text)) / 6)
"""
