"""A game of verifiers: the environment speaks as the user, turn by turn, and scores at the end."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class GameData(vf.TaskData):
    secret: int


class GameTask(vf.Task[GameData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return "give up" in trace.last_reply


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    hints: bool = True


class Game(vf.Env[GameConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = segment.last_reply
                if guess == str(task.data.secret):
                    won = True
                    break
                hint = "higher" if guess.isdigit() and int(guess) < task.data.secret else "lower"
                segment = await interaction.turn(hint if self.config.hints else "no")
        interaction.trace.record_reward("won", float(won))


class Guesses(vf.Taskset[GameTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GameTask]:
        for secret in range(16):
            yield GameTask(GameData(id=f"secret-{secret}", prompt="Guess 0-15.", secret=secret), self.config.task)


__all__ = ["Game", "Guesses"]
