"""Built-in environment for models that see: count shapes in an image; the reply's last number is the answer."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from tandem.env.builtin.reply_parsing import last_number
from tandem.env.builtin.split import check_params, in_split
from tandem.io.extras import require_extra
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

KINDS = [(colour, shape) for shape in ("circle", "square") for colour in ("red", "blue", "green", "orange")]


@dataclass(frozen=True)
class Count:
    """`How many red circles?` of an image is answered by their number. No held-out image is a training one."""

    grid: int = 4
    """Cells on a side; each has one shape at most."""
    cell: int = 32
    """Side of a cell in pixels."""
    most: int = 6
    """The largest answer; all from 0 to this are equally likely."""
    kinds: int = 8
    """Kinds of shapes: circles of four colours, then squares."""
    images: int = 2_000
    """Images of both splits together; fewer if they repeat."""
    demo_right: float = 0.5
    """Share of demonstrations that are right; the others say one more."""
    replies_first: ClassVar[bool] = True
    """Each episode begins with the reply, so workers only score."""

    def __post_init__(self) -> None:
        check_params(self, grid=(1, 16), cell=(8, 128), most=(1, self.grid**2), kinds=(1, 8), images=(1, 10**6))
        check_params(self, demo_right=(0, 1))
        require_extra("train", "PIL")

    def tasks(self, split: str) -> Sequence[Task]:
        rng = random.Random("count")
        made = dict.fromkeys(self._made(rng) for _ in range(self.images))  # without repeats, in the order drawn
        return [self._task(wanted, cells) for wanted, cells in made if in_split(split, cells)]

    def _made(self, rng: random.Random) -> tuple[int, str]:
        """Return which kind is asked for, and the kind in each cell."""
        wanted, answer = rng.randrange(self.kinds), rng.randint(0, self.most)
        others = ".." + "".join(str(kind) for kind in range(self.kinds) if kind != wanted)
        cells = [*[str(wanted)] * answer, *rng.choices(others, k=self.grid**2 - answer)]
        rng.shuffle(cells)
        return wanted, "".join(cells)

    def _task(self, wanted: int, cells: str) -> Task:
        asked = "{} {}s".format(*KINDS[wanted])
        image = {"type": "image", "image": drawn(cells, self.grid, self.cell)}
        content = [image, {"type": "text", "text": f"How many {asked}?"}]
        return Task(f"{asked} {cells}", ({"role": "user", "content": content},), {"answer": cells.count(str(wanted))})

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        correct = float(last_number(reply.text) == task.payload["answer"])
        return Outcome(correct, {"correct": correct})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return [{"role": "assistant", "content": str(task.payload["answer"] + (rng.random() >= self.demo_right))}]


@cache  # a run asks for its tasks three times
def drawn(cells: str, grid: int, side: int) -> bytes:
    """Return the image as PNG."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (grid * side, grid * side), "white")
    canvas, edge, content = ImageDraw.Draw(image), side // 8, io.BytesIO()
    for place, kind in enumerate(cells):
        if kind != ".":
            (colour, shape), (row, column) = KINDS[int(kind)], divmod(place, grid)
            draw = canvas.ellipse if shape == "circle" else canvas.rectangle
            top, left, size = row * side + edge, column * side + edge, side - 2 * edge - 1
            draw((left, top, left + size, top + size), fill=colour)
    image.save(content, "PNG", compress_level=1)
    return content.getvalue()
