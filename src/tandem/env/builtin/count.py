"""Built-in environment: count shapes in an image in one turn; the reply's last number is the answer."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tandem.env.builtin.reply_parsing import last_number
from tandem.env.builtin.split import check_params, in_split
from tandem.io.extras import require_extra
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

COLOURS = {"red": (214, 40, 40), "blue": (30, 90, 200), "green": (20, 140, 70), "orange": (245, 140, 20)}
SHAPES = ("circle", "square", "triangle")
_BACKGROUND = (244, 242, 236)


@dataclass(frozen=True)
class Count:
    """An image with shapes is asked `How many red circles?`; for models that see. No held-out image is in training."""

    grid: int = 4
    """Cells on a side; each holds one shape at most."""
    cell: int = 32
    """Side of a cell in pixels."""
    most: int = 6
    """Largest answer; answers from 0 to this are equally frequent."""
    shapes: int = 3
    """Kinds of shapes, from one to three: circles, squares, triangles."""
    colours: int = 4
    """Colours, from one to four: red, blue, green, orange."""
    images: int = 2_000
    """Images of both splits together."""
    demo_right: float = 0.5
    """Share of demonstrations that are right; the others miss by one."""

    def __post_init__(self) -> None:
        check_params(
            self, grid=(1, 16), cell=(8, 128), most=(1, self.grid**2), shapes=(1, 3), colours=(1, 4),
            images=(16, 100_000), demo_right=(0, 1),
        )  # fmt: skip
        require_extra("train", "PIL")

    def tasks(self, split: str) -> Sequence[Task]:
        rng = random.Random("count")
        pictures = dict.fromkeys(self._picture(rng) for _ in range(self.images))  # without repeats, in the order drawn
        return [self._task(each) for each in pictures if in_split(split, str(each.cells))]

    def _picture(self, rng: random.Random) -> Picture:
        """Draw what is in the image first: the answer, and then other shapes in other cells."""
        kinds = [(colour, shape) for colour in [*COLOURS][: self.colours] for shape in SHAPES[: self.shapes]]
        wanted, answer = rng.choice(kinds), rng.randint(0, self.most)
        others = [kind for kind in kinds if kind != wanted]
        room = self.grid**2 - answer
        more = rng.choices(others, k=rng.randint(0, room)) if others else []
        cells = [*[wanted] * answer, *more, *[None] * (room - len(more))]
        rng.shuffle(cells)
        return Picture(self.grid, self.cell, tuple(cells), wanted)

    def _task(self, picture: Picture) -> Task:
        colour, shape = picture.wanted
        content = [
            {"type": "image", "image": drawn(picture)},
            {"type": "text", "text": f"How many {colour} {shape}s?"},
        ]
        name = "".join("." if each is None else each[0][0] + each[1][0] for each in picture.cells)
        answer = picture.cells.count(picture.wanted)
        return Task(f"{colour}-{shape}s-{name}", ({"role": "user", "content": content},), {"answer": answer})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        correct = float(last_number(reply.text) == task.payload["answer"])
        return Outcome(correct, {"correct": correct})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        answer: int = task.payload["answer"]
        shown = answer if rng.random() < self.demo_right else answer + rng.choice((-1, 1) if answer else (1,))
        return [{"role": "assistant", "content": str(shown)}]


Kind = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Picture:
    """What an image has in its cells, row by row, and what is asked for."""

    grid: int
    cell: int
    cells: tuple[Kind | None, ...]
    wanted: Kind


@cache  # a run asks for its tasks three times
def drawn(picture: Picture) -> bytes:
    """Return the image of a picture as PNG."""
    from PIL import Image, ImageDraw

    side, edge = picture.cell, max(1, picture.cell // 8)
    image = Image.new("RGB", (picture.grid * side, picture.grid * side), _BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for place, kind in enumerate(picture.cells):
        if kind is None:
            continue
        top, left = divmod(place, picture.grid)
        x0, y0 = left * side + edge, top * side + edge
        x1, y1 = (left + 1) * side - edge - 1, (top + 1) * side - edge - 1
        colour = COLOURS[kind[0]]
        if kind[1] == "circle":
            canvas.ellipse((x0, y0, x1, y1), fill=colour)
        elif kind[1] == "square":
            canvas.rectangle((x0, y0, x1, y1), fill=colour)
        else:
            canvas.polygon([(x0, y1), (x1, y1), ((x0 + x1) / 2, y0)], fill=colour)
    content = io.BytesIO()
    image.save(content, "PNG", compress_level=1)
    return content.getvalue()
