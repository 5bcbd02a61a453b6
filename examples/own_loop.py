"""A training loop of your own in twenty lines: REINFORCE on a reward that is any function. Half a minute on a CPU."""

from __future__ import annotations

import statistics

import tandem


def reward(text: str) -> float:
    """The share of small letters: a model from scratch says bytes of all kinds."""
    return sum("a" <= character <= "z" for character in text) / max(1, len(text))


def main(steps: int = 30) -> list[float]:
    means: list[float] = []
    with tandem.Trainer({"model": {"preset": "tiny"}, "train": {"max_tokens": 8, "lr": 2e-3}}) as trainer:
        for _ in range(steps):
            groups = trainer.sample(["say something", "and again"], n=32)
            for trajectory in (each for group in groups for each in group):
                trajectory.reward = reward(str(trajectory.messages[-1]["content"]))
            trainer.forward_backward(groups)
            trainer.optim_step()
            trainer.publish()
            means.append(statistics.fmean(each.reward for group in groups for each in group))
            print(f"step {trainer.version}: mean reward {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    main()
