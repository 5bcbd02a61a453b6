"""What keeping every training sample costs: `python benchmarks/kept_samples.py [--samples 1000000]`.

It writes samples as a run does (steps of 512, each with made-up text of its own), and then measures the disk, the
searches, and the time that each step waits.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from tandem.io.kept_samples import PLACE, KeptSamples, samples
from tandem.types import Trajectory

_GROUPS, _SIBLINGS = 32, 16
_SYLLABLES = (
    "an",
    "be",
    "con",
    "der",
    "el",
    "fa",
    "ga",
    "ho",
    "in",
    "ka",
    "lo",
    "ma",
    "ne",
    "or",
    "pa",
    "qui",
    "ra",
    "si",
    "ter",
    "un",
    "ve",
    "wi",
    "xo",
    "ye",
    "zu",
    "sh",
    "th",
    "ing",
    "ed",
)
_SEARCHES = {
    "the newest 10": {"limit": 10},
    "one step, reward >= 0.9": {"steps": 7, "min_reward": 0.9},
    "reward >= 0.9, limit 100": {"min_reward": 0.9, "limit": 100},
    "a text in every tenth sample, limit 100": {"grep": "so the answer is 42", "limit": 100},
    "a text in one sample, the oldest": {"grep": "Needle in the Haystack"},
    "a text in none": {"grep": "no such sentence anywhere"},
    "two common words that stand nowhere together": {"grep": "NO-PAIR"},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--samples", type=int, default=1_000_000)
    count = arguments.parse_args().samples
    place = Path(tempfile.mkdtemp(prefix="samples-"))
    made, seconds, cpu_s, characters, tokens, step = _Texts(), 0.0, 0.0, 0, 0, 0
    writer = KeptSamples(
        place, after_step=0, share=1.0, max_bytes=2**40, decode=made.spelled, spell=made.spelled, tell=print
    )
    for step in range(1, count // (_GROUPS * _SIBLINGS) + 1):
        groups = made.step(step)
        characters += sum(len(t.messages[-1]["content"]) for group in groups for t in group)
        tokens += sum(len(t.ids) for group in groups for t in group)
        started, used = time.perf_counter(), _cpu_s()
        writer.keep(step, groups)
        seconds += time.perf_counter() - started
        writer.settle()
        cpu_s += _cpu_s() - used
    writer.close()
    written = step * _GROUPS * _SIBLINGS
    size = sum(path.stat().st_size for path in (place / PLACE).iterdir())
    print(f"| samples | {written:,}, answers of {characters / written:.0f} characters and "
          f"{tokens / written:.0f} tokens in the mean |")  # fmt: skip
    print(f"| disk | {size / written:.0f} bytes a sample, {size / 2**30:.2f} GiB |")
    print(f"| a step of 512 waits | {1000 * seconds / step:.3f} ms |")
    print(f"| the writing thread works | {1000 * cpu_s / step:.1f} ms a step of 512 |")
    for name, asked in _SEARCHES.items():
        asked = dict(asked)
        if asked.get("grep") == "NO-PAIR":
            asked["grep"] = made.apart
        started = time.perf_counter()
        found = samples(place, **asked)
        print(f"| search: {name} | {time.perf_counter() - started:.3f} s, {len(found)} found |")
    shutil.rmtree(place)


class _Texts:
    """Makes texts of words that are as unequal in frequency as those of a language."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        words = {"".join(self.random.choices(_SYLLABLES, k=self.random.randint(1, 4))) for _ in range(20_000)}
        self.words = self.random.sample(sorted(words), len(words))
        self.weights = [*accumulate(1 / (rank + 3) for rank in range(len(self.words)))]
        self.sentences = [
            " ".join(self.random.choices(self.words, cum_weights=self.weights, k=8)) for _ in range(50_000)
        ]
        self.pieces: dict[str, int] = {}
        self.texts: list[str] = []
        self.apart = f"{self.words[40]} {self.words[9000]} {self.words[50]}"

    def step(self, step: int) -> list[list[Trajectory]]:
        return [self._group(step, number) for number in range(_GROUPS)]

    def _group(self, step: int, number: int) -> list[Trajectory]:
        prompt = [{"role": "user", "content": f"Question {step}.{number}: {self._text(3)}?"}]
        return [self._sample(step, number, sibling, prompt) for sibling in range(_SIBLINGS)]

    def _sample(self, step: int, number: int, sibling: int, prompt: list[dict[str, str]]) -> Trajectory:
        answer = self._text(self.random.randint(5, 25))
        if self.random.random() < 0.1:
            answer += " so the answer is 42"
        if (step, number, sibling) == (1, 0, 0):
            answer += " needle in the haystack"
        ids = self._ids(answer)
        sizes = [-self.random.expovariate(2.0) for _ in ids]
        return Trajectory(
            ids, [True] * len(ids), sizes, [step - 1] * len(ids), self.random.random(),
            task_id=f"task-{step}-{number}", metrics={"correct": 1.0, "format": 0.5},
            messages=[*prompt, {"role": "assistant", "content": answer}],
        )  # fmt: skip

    def _ids(self, text: str) -> list[int]:
        """Words are cut into pieces of at most five characters: four characters a token in the mean."""
        found: list[int] = []
        for word in text.split(" "):
            for at in range(0, len(word) + 1, 5):
                piece = f" {word}"[at : at + 5]
                if piece and piece not in self.pieces:
                    self.pieces[piece] = len(self.texts)
                    self.texts.append(piece)
                found += [self.pieces[piece]] if piece else []
        return found

    def spelled(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[each] for each in ids)

    def _text(self, sentences: int) -> str:
        return " ".join(self.random.choices(self.sentences, k=sentences))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
