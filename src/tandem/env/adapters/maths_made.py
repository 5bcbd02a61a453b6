"""Generate problems in the form of GSM8K and of MATH. Equal seeds give equal problems on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    solution: str
    """The worked solution, with its answer marked as in the data set."""
    answer: str


def word_problems(count: int, steps: int, seed: int) -> list[Problem]:
    """Return `count` different problems. `steps`: calculations from question to answer."""
    return _different(count, random.Random(f"words {seed}"), lambda rng: _story(rng, steps))


def latex_problems(count: int, seed: int) -> list[Problem]:
    return _different(count, random.Random(f"latex {seed}"), lambda rng: rng.choice(_KINDS)(rng))


def _different(count: int, rng: random.Random, make: Callable[[random.Random], Problem]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for _ in range(20 * count):
        problem = make(rng)
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


# --- in words, as GSM8K: `<<3*4=12>>` after each calculation, `#### 12` at the end

_NAMES = ("Ada", "Ben", "Chloe", "Dario", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_PLACES = ("at the market", "in a drawer", "in the attic", "on the shelf", "at school")


def _story(rng: random.Random, steps: int) -> Problem:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    have = rng.randint(3, 40)
    told = [f"{name} has {have} {things}."]
    worked: list[str] = []
    for _ in range(steps):
        sentence, calculation, now = rng.choice(_EVENTS)(rng, name, things, have)
        told.append(sentence)
        worked.append(f"{name} has {calculation} = <<{calculation}={now}>>{now} {things}.")
        have = now
    told.append(f"How many {things} does {name} have now?")
    return Problem(" ".join(told), "\n".join([*worked, f"#### {have}"]), str(have))


_Event = tuple[str, str, int]


def _finds(rng: random.Random, name: str, things: str, have: int) -> _Event:
    more = rng.randint(2, 30)
    return f"{name} finds {more} more {rng.choice(_PLACES)}.", f"{have}+{more}", have + more


def _gives(rng: random.Random, name: str, things: str, have: int) -> _Event:
    if have < 3:
        return _finds(rng, name, things, have)
    fewer, friend = rng.randint(1, have - 1), rng.choice([other for other in _NAMES if other != name])
    return f"{name} gives {fewer} of them to {friend}.", f"{have}-{fewer}", have - fewer


def _boxes(rng: random.Random, name: str, things: str, have: int) -> _Event:
    boxes, each = rng.randint(2, 6), rng.randint(2, 9)
    return (
        f"Then {name} buys {boxes} boxes with {each} {things} in each.",
        f"{have}+{boxes}*{each}",
        have + boxes * each,
    )


def _doubles(rng: random.Random, name: str, things: str, have: int) -> _Event:
    if have > 200:
        return _gives(rng, name, things, have)
    times, word = rng.choice([(2, "twice"), (3, "three times"), (4, "four times")])
    return f"A year later {name} has {word} as many {things}.", f"{have}*{times}", have * times


def _shares(rng: random.Random, name: str, things: str, have: int) -> _Event:
    parts = [number for number in range(2, 7) if have % number == 0]
    if not parts or have < 6:
        return _finds(rng, name, things, have)
    people = rng.choice(parts)
    return (
        f"{name} shares them equally among {people} people, {name} being one of them.",
        f"{have}/{people}",
        have // people,
    )


_EVENTS = (_finds, _gives, _boxes, _doubles, _shares)


# --- in LaTeX, as MATH: the answer stands in \boxed{}


def _fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _boxed(question: str, worked: str, answer: str) -> Problem:
    return Problem(question, f"{worked} The answer is $\\boxed{{{answer}}}$.", answer)


def _linear(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 12), rng.randint(-20, 20) or 7, rng.randint(-30, 30)
    answer = _fraction(Fraction(c - b, a))
    return _boxed(f"Solve ${a}x {b:+d} = {c}$ for $x$.", f"We have ${a}x = {c - b}$, so $x = {answer}$.", answer)


def _sum_of_fractions(rng: random.Random) -> Problem:
    first = Fraction(rng.randint(1, 11), rng.randint(2, 12))
    second = Fraction(rng.randint(1, 11), rng.randint(2, 12))
    shown = f"{_fraction(first)} + {_fraction(second)}"
    answer = _fraction(first + second)
    return _boxed(f"Compute ${shown}$. Give a common fraction in lowest terms.", f"${shown} = {answer}$.", answer)


def _quadratic(rng: random.Random) -> Problem:
    low, high = sorted(rng.sample([number for number in range(-9, 10) if number], 2))
    b, c = -(low + high), low * high
    middle = "" if b == 0 else f" {'+' if b > 0 else '-'} {abs(b) if abs(b) != 1 else ''}x"
    equation = f"x^2{middle} {'+' if c > 0 else '-'} {abs(c)} = 0"
    worked = f"The roots add up to ${low + high}$, and their product is ${c}$: they are ${low}$ and ${high}$."
    return _boxed(f"What is the larger root of ${equation}$?", worked, str(high))


def _remainder(rng: random.Random) -> Problem:
    base, power, modulus = rng.randint(2, 12), rng.randint(3, 9), rng.randint(5, 19)
    left = pow(base, power, modulus)
    question = f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?"
    return _boxed(question, f"${base}^{{{power}}} = {base**power} \\equiv {left} \\pmod{{{modulus}}}$.", str(left))


def _root(rng: random.Random) -> Problem:
    outside, inside = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10])
    number, answer = outside * outside * inside, f"{outside}\\sqrt{{{inside}}}"
    return _boxed(
        f"Simplify $\\sqrt{{{number}}}$.", f"${number} = {outside}^2 \\cdot {inside}$, so it is ${answer}$.", answer
    )


def _expand(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    answer = f"x^2 + {a + b}x + {a * b}"
    return _boxed(f"Expand $(x + {a})(x + {b})$.", f"$x^2 + {a}x + {b}x + {a * b}$.", answer)


_KINDS = (_linear, _sum_of_fractions, _quadratic, _remainder, _root, _expand)
