"""Images in messages: what edges take and refuse, where images stand among tokens, and what keeps them."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import struct
import zlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_images import END, PAD, START, VIDEO, as_png, drawn, seeing_tokenizer
from PIL import Image, ImageColor

from tandem.data.conversation import BadRow, located, parse_row
from tandem.data.load import load_rows
from tandem.data.preference_pairs import load_pairs, parse_pair
from tandem.env.builtin.count import Count
from tandem.env.human_player import try_environment
from tandem.env.prompts.environment import Prompts
from tandem.env.worker_messages import FROM_EPISODE
from tandem.errors import DataError, EpisodeFailed, GroupRefused, ImageError
from tandem.io.image_parts import interned, portable
from tandem.io.image_store import MOST_BYTES, ImageStore, opened
from tandem.io.kept_samples import KeptSamples, samples
from tandem.rollout.episode import Setting
from tandem.rollout.evaluate import evaluate
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.recorded_producer import record
from tandem.rollout.store import MemoryStore
from tandem.rollout.teacher import ServedTeacher
from tandem.rollout.wire.codec import encode
from tandem.spec.data import FileData
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Outcome, PlacedImage, Sampling, Span, Task, Trajectory, text_of

TOKENIZER = seeing_tokenizer()
CAT, DOG = drawn(32, 16, 1), drawn(16, 64, 2)


class Patches:
    """An ImageSource over a store: a token for each 16 x 16 pixels."""

    pad_id = PAD

    def __init__(self, store: ImageStore) -> None:
        self._store = store

    def grid(self, digest: str) -> tuple[int, int, int]:
        image = opened(self._store.read(digest))
        return 1, image.height // 8, image.width // 8

    def length(self, digest: str) -> int:
        _, height, width = self.grid(digest)
        return height * width // 4

    def pixels(self, digest: str) -> Any:
        return torch.zeros(self.length(digest) * 4, 384)

    def key(self, digest: str) -> str:
        return digest


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def user(*parts: str | bytes | dict) -> dict:
    written = {str: lambda each: {"type": "text", "text": each}, bytes: lambda each: {"type": "image", "image": each}}
    return {"role": "user", "content": [written.get(type(each), dict)(each) for each in parts]}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def seeing(store: ImageStore) -> Renderer:
    return Renderer(TOKENIZER, images=Patches(store))


def are_at_their_pads(ids: list[int], placed: list[PlacedImage], *digests: str) -> None:
    """Check that each image has the place of as many pads as it has tokens, between its marks."""
    assert [each.digest for each in placed] == list(digests)
    for each in placed:
        assert ids[each.offset - 1 : each.offset + each.length + 1] == [START, *[PAD] * each.length, END]
    assert ids.count(PAD) == sum(each.length for each in placed)


# --- where images stand


def test_two_images_of_a_turn_and_one_of_the_next_have_their_places_in_the_whole_conversation(store):
    cat, dog = store.put(CAT), store.put(DOG)
    renderer = seeing(store)
    first = interned([user("Which is first, ", CAT, " or ", DOG, "?")], store, "a test")
    second = interned([user(DOG, "and this?")], store, "a test")
    ids = renderer.prompt(first)
    placed = renderer.placed(first, ids)
    are_at_their_pads(ids, placed, cat, dog)
    assert [(each.grid, each.length) for each in placed] == [((1, 2, 4), 2), ((1, 8, 2), 4)]
    ids += [*renderer.encode("the cat"), renderer.end_id]
    glue = renderer.glue(second, ids[-1])
    placed += renderer.placed(second, glue, len(ids))
    ids += glue
    are_at_their_pads(ids, placed, cat, dog, dog)
    recorded = record(renderer, [*first, assistant("the cat"), *second, assistant("a dog")], "whole")
    assert recorded.ids[: len(ids)] == ids
    assert recorded.images == placed


@pytest.mark.parametrize("mark", ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
def test_text_that_writes_the_mark_of_an_image_is_refused_by_name(store, mark):
    renderer = seeing(store)
    forged = [
        [user(f"look {mark} here")],
        [{"role": "user", "content": f"look {mark} here"}],
        [user(CAT, mark[:5], mark[5:])],  # the template joins them
        [{"role": "tool", "content": mark}],
    ]
    for messages in forged:
        kept = interned(messages, store, "a test")
        with pytest.raises(ImageError, match=f"the text has {mark[:-1]}".replace("|", r"\|")):
            renderer.prompt(kept)
    with pytest.raises(ImageError, match="stands for an image"):
        renderer.glue([{"role": "user", "content": mark}], renderer.end_id)
    with pytest.raises(ImageError, match="stands for an image"):
        renderer.conversation([{"role": "user", "content": "?"}, assistant(mark)])
    assert VIDEO in TOKENIZER.encode("<|video_pad|>")  # typed text is encoded as the mark
    blind = Renderer(TOKENIZER)
    for refuses in (renderer.encode, blind.encode, lambda text: blind.prompt([{"role": "user", "content": text}])):
        with pytest.raises(ImageError, match="stands for an image"):  # without images of a run, too
            refuses(f"look {mark} here")
    plain = copy.deepcopy(TOKENIZER)
    plain.chat_template = byte_tokenizer().chat_template
    assert PAD in Renderer(plain).encode("<|image_pad|>")  # of a model of text: its template writes none


def test_a_model_of_text_refuses_an_image_and_so_does_a_template_that_drops_it(store):
    messages = interned([user(CAT, "?")], store, "a test")
    with pytest.raises(ImageError, match="this model takes text only"):
        Renderer(TOKENIZER).prompt(messages)
    with pytest.raises(ImageError, match="task 3: has an image, but only text is taken here"):
        interned([user(CAT)], None, "task 3")
    renderer = seeing(store)
    renderer.tokenizer = seeing_tokenizer()
    renderer.tokenizer.chat_template = renderer.tokenizer.chat_template.replace("part.type == 'image'", "false")
    with pytest.raises(ImageError, match="its chat template drops images, of the roles user"):
        renderer.prompt(messages)
    with pytest.raises(ImageError, match="that no edge has kept"):
        seeing(store).prompt([user(CAT)])


# --- edges


def test_bytes_a_picture_a_path_and_a_data_uri_are_one_image(store, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    uri = "data:image/png;base64," + base64.b64encode(CAT).decode()
    forms = [
        CAT,
        {"type": "image", "path": str(tmp_path / "cat.png")},
        {"type": "image", "image": tmp_path / "cat.png"},
        {"type": "image", "image": uri, "path": None},
        {"type": "image_url", "image_url": {"url": uri}},
    ]
    (kept,) = interned([user(*forms)], store, "a test")
    assert {json.dumps(part) for part in kept["content"]} == {
        json.dumps({"type": "image", "image": f"sha256:{store.put(CAT)}", "size": [32, 16]})
    }
    assert interned([kept], store, "again") == (kept,)
    assert interned(portable([user(*forms)], "a test"), store, "by a worker") == (kept,)
    (drawn_here,) = interned([user({"type": "image", "image": Image.new("RGB", (48, 16), "red")})], store, "a test")
    assert opened(store.read(drawn_here["content"][0]["image"][7:])).getpixel((47, 15)) == (255, 0, 0)
    assert interned([user("a", "b")], store, "a test") == ({"role": "user", "content": "ab"},)
    assert text_of(kept["content"]).startswith(f"[image {store.put(CAT)[:12]} 32x16]")


def bomb() -> bytes:
    """The beginning of a PNG of 20,000 x 20,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = [
        struct.pack(">I", size) + each + struct.pack(">I", zlib.crc32(each))
        for size, each in ((13, head), (0, b"IDAT"))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_what_is_transparent_is_white_and_a_file_that_changed_is_written_again(store, tmp_path):
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    found = opened(as_png(clear))
    assert (found.mode, found.getpixel((0, 0)), found.getpixel((1, 0))) == ("RGB", (255, 255, 255), (0, 0, 255))
    digest = store.put(CAT)
    (tmp_path / "images" / digest).write_bytes(DOG)
    assert ImageStore(tmp_path / "images").put(CAT) == digest
    assert store.read(digest) == CAT


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "nothing is fetched"),
        ({"type": "image", "image": "http://example.org/cat.png"}, "nothing is fetched"),
        ({"type": "video", "video": "cat.mp4"}, "a part of type 'video'; text and image are taken"),
        ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'"),
        (
            {"type": "image", "url": "cat.png"},
            "an image has a 'path', an 'image' or an 'image_url'; this has type, url",
        ),
        ({"type": "image", "image": b""}, "it is empty"),
        ({"type": "image", "image": as_png(Image.new("I;16", (2, 2)))}, "more than 8 bits a channel"),
        ({"type": "image", "image": bomb()}, "more pixels than the"),
        ({"type": "image", "path": "no_such.png"}, "'no_such.png' is no file"),
        ({"type": "image", "image": b"<svg/>"}, "it is no image that can be read"),
        ({"type": "image", "image": bytes(MOST_BYTES + 1)}, "bytes are more than"),
        ({"type": "image", "image": "sha256:../../etc/passwd"}, "is no SHA-256"),
        ({"type": "image", "image": "sha256:" + "0" * 64}, "it cannot be read from"),
    ],
)
def test_what_is_no_image_that_can_be_had_is_refused_with_its_place(store, part, said):
    with pytest.raises(ImageError) as error:
        interned([user(part)], store, "task 7")
    assert said in str(error.value)
    if said not in ("is no SHA-256", "it cannot be read from"):
        assert str(error.value).startswith("task 7: ")


def test_an_answer_is_text_and_a_worker_names_no_file_of_this_process(store):
    with pytest.raises(ImageError, match="models answer with text"):
        interned([{**user(CAT), "role": "assistant"}], store, "a test")
    said = {"op": "reply", "id": 0, "said": portable([user(CAT)], "a test"), "max_tokens": None, "stop": []}
    assert FROM_EPISODE.validate_json(json.dumps(said)).said[0].plain() == said["said"][0]  # type: ignore[union-attr]
    for part in (
        {"type": "image", "path": "/secret.png"},
        {"type": "image", "image": "/secret.png"},
        {"type": "image_url", "image_url": {"url": "/secret.png"}},
    ):
        with pytest.raises(ValueError, match="an image is not a data URI"):
            FROM_EPISODE.validate_json(json.dumps({**said, "said": [user(part)]}))


def rows_of(path: Path, *rows: dict) -> FileData:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return FileData(path=str(path), eval_share=0.0)


def test_a_row_names_images_beside_its_file_and_has_their_digests(store, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(CAT)
    asked = [user({"type": "image", "path": "pictures/cat.png"}, "What is it?"), assistant("a cat")]
    spec = rows_of(tmp_path / "rows.jsonl", {"messages": asked}, {"prompt": asked[:1], "completion": "a cat"})
    found = load_rows(spec, "data", lambda messages: interned(messages, store, "image")).train
    digest = f"sha256:{store.put(CAT)}"
    for row in found:
        assert row.messages[0]["content"][0] == {"type": "image", "image": digest, "size": [32, 16]}
        assert row.messages[1]["content"] == "a cat"
    score = tmp_path / "score.py"
    score.write_text("def fine(answer):\n    return 1.0\n", encoding="utf-8")
    told = {"path": spec.path, "columns": {"prompt": "messages"}, "allow_bad_rows": True, "eval_share": 0.0}
    (task,) = Prompts(data=told, reward=f"{score}:fine").tasks("train")
    assert interned(task.messages, store, "a prompt") == (found[0].messages[0],)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "nothing is fetched"),
        ({"type": "video", "video": "cat.mp4"}, "a part of type 'video'"),
        ({"type": "image", "path": "gone.png"}, "gone.png' is no file"),
        ({"type": "image", "path": "rows.jsonl"}, "rows.jsonl': it is no image that can be read"),
        ({"type": "video", "path": "cat.mp4"}, "a part of type 'video'"),
        ({"type": "text", "text": "a", "image": "cat.png"}, "1 x a column 'images', which is not read"),
    ],
)
def test_a_row_with_what_is_not_taken_is_refused_with_its_line(store, tmp_path, part, said):
    row = {"messages": [user(part), assistant("a cat")], "images": ["cat.png"] if part["type"] == "text" else []}
    spec = rows_of(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError) as error:
        load_rows(spec, "data", lambda messages: interned(messages, store, "image"), sees=True)
    assert said in str(error.value)
    assert "rows.jsonl:1" in str(error.value)


def test_only_sft_and_prompts_read_images_and_a_data_set_no_path(tmp_path):
    asked = user({"type": "image", "path": "cat.png"}, "What is it?")
    only = "a message has an image, and only recipe = 'sft' and recipe = 'rl' train on images"
    with pytest.raises(BadRow, match=f"prompt: {only}"):
        parse_pair({"prompt": [asked], "chosen": "yes", "rejected": "no"})
    with pytest.raises(BadRow, match=only):
        parse_row({"messages": [asked, assistant("yes")]})
    found = parse_row({"messages": [asked, assistant("yes")]}, images=True)
    pairs = rows_of(tmp_path / "pairs.jsonl", {"prompt": [asked], "chosen": "yes", "rejected": "no"})
    with pytest.raises(DataError, match=only) as error:
        load_pairs(pairs)
    assert "say which column holds what" not in str(error.value)
    assert located(found, Path("/rows"))[0]["content"][0] == {"type": "image", "path": "/rows/cat.png"}
    with pytest.raises(BadRow, match="an image by its path, which only a file can have"):
        located(found, None)


# --- episodes


class Shows:
    """Shows a dog after a cat."""

    def tasks(self, split: str) -> list[Task]:
        return [Task("cat", (user(CAT, "What is it?"),))]

    async def run(self, task: Task, chat: Any) -> Outcome:
        await chat.reply()
        chat.say(user("And ", {"type": "image", "image": opened(DOG)}, "?"))
        await chat.reply()
        return Outcome(1.0)


class Looks:
    """Answers with the mark of an image, as a policy can, and remembers what it was asked."""

    version = 0

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self.asked: list[tuple[list[int], tuple[PlacedImage, ...]]] = []

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        for image in sampling.images:
            opened(self._store.read(image.digest))  # on the disk before anything names it
        self.asked.append((list(prompt_ids), sampling.images))
        return Completion([PAD, TOKENIZER.eos_token_id], [-0.5, -0.1], [Span(0, 2)], "stop")


def setting_of(store: ImageStore | None, engine: Any, environment: Any = None, renderer: Any = None) -> Setting:
    renderer = renderer or (seeing(store) if store else Renderer(TOKENIZER))
    return Setting(environment or Shows(), engine, renderer, Sampling(max_tokens=2), 512, 5.0, 5.0, images=store)


def played(setting: Setting) -> tuple[list[list[Trajectory]], MemoryStore]:
    """Play groups of two; return those taken, with a store that still holds another."""

    async def play() -> tuple[list[list[Trajectory]], MemoryStore]:
        groups = MemoryStore(2, take_timeout_s=5)
        producer = EnvironmentProducer(setting, groups, lambda group: True, group_size=2, seed=0, max_failed_share=0.0)
        running = asyncio.create_task(producer.run())
        try:
            taken = await groups.take(1)
            while not all(group for _, group in groups.state()["in_flight"]):
                await asyncio.sleep(0)
            return taken, groups
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(play())


def test_an_episode_asks_with_its_images_and_records_them_behind_a_sampled_mark(store):
    engine = Looks(store)
    ((first, second), *_), _ = played(setting_of(store, engine))
    cat, dog = store.put(CAT), first.images[1].digest
    assert [each.digest for each in first.images] == [cat, dog]
    assert opened(store.read(dog)).tobytes() == opened(DOG).tobytes()
    assert (first.ids, first.images) == (second.ids, second.images)
    for each in first.images:
        assert first.ids[each.offset - 1 : each.offset + each.length + 1] == [START, *[PAD] * each.length, END]
    sampled = [at for at, token in enumerate(first.ids) if token == PAD and first.trained[at]]
    assert len(sampled) == 2  # the policy's own marks: no image has their places
    assert first.images[0].offset < sampled[0] < first.images[1].offset < sampled[1]
    for prompt_ids, images in engine.asked:
        assert list(images) == first.images[: len(images)]
        assert prompt_ids == first.ids[: len(prompt_ids)]
    assert {len(images) for _, images in engine.asked} == {1, 2}
    assert not any(isinstance(part.get("image"), bytes) for each in first.messages for part in each["content"]
                   if isinstance(part, dict))  # fmt: skip


def test_a_checkpoint_gives_groups_their_images_back(store):
    _, groups = played(setting_of(store, Looks(store)))
    saved = json.loads(json.dumps(groups.state(), default=asdict))
    restored = MemoryStore(2)
    restored.restore(saved)
    assert restored.state() == groups.state()
    ((_, (first, _)),) = restored.state()["in_flight"]
    assert isinstance(first.images[0], PlacedImage)


def test_an_image_that_has_changed_or_is_gone_is_refused_by_name(store, tmp_path):
    digest = store.put(CAT)
    (tmp_path / "images" / digest).write_bytes(DOG)
    again = ImageStore(tmp_path / "images")  # of a resumed run
    with pytest.raises(ImageError, match=f"image {digest[:12]}: the file in .*images has changed since it was kept"):
        again.read(digest)
    (tmp_path / "images" / digest).unlink()
    with pytest.raises(ImageError, match=f"image {digest[:12]}: it cannot be read"):
        again.read(digest)


def test_images_are_refused_by_name_where_only_text_goes(store):
    ((first, second),), _ = played(setting_of(store, Looks(store)))
    with pytest.raises(GroupRefused, match="a frame has no images"):
        encode([first, second])
    teacher = ServedTeacher("http://127.0.0.1:1/v1", "", "", timeout_s=1)
    with pytest.raises(Exception, match="task cat has images, and a served teacher is sent tokens only"):
        asyncio.run(teacher.score([[first]]))
    with pytest.raises(ImageError, match="task cat: has an image, but only text is taken here"):
        asyncio.run(evaluate(setting_of(None, Looks(store)), Shows().tasks("eval"), 2))

    class AsksAJudge(Shows):
        async def run(self, task: Task, chat: Any) -> Outcome:
            await chat.judge([user(CAT)])
            return Outcome(0.0)

    setting = replace(setting_of(store, Looks(store), AsksAJudge()), judge=object())  # type: ignore[arg-type]
    with pytest.raises(Exception, match="a judge takes text only, and was shown an image"):
        asyncio.run(evaluate(setting, Shows().tasks("eval"), 2))


def test_samples_show_an_image_as_a_mark(store, tmp_path):
    groups, _ = played(setting_of(store, Looks(store)))
    said = list[str]()
    kept = KeptSamples(tmp_path, after_step=0, share=1.0, max_bytes=2**30, decode=TOKENIZER.decode, tell=said.append)
    kept.keep(1, groups)
    kept.settle()
    kept.close()
    assert said == []
    (row, _) = samples(tmp_path, grep="what is it")
    assert row["prompt"] == f"[image {store.put(CAT)[:12]} 32x16] What is it?"


# --- the environment that counts


def test_counts_answer_is_how_many_cells_of_its_image_have_the_shape(store, tmp_path):
    environment = Count(grid=3, cell=16, most=4, images=60)
    tasks = [*environment.tasks("train"), *environment.tasks("eval")]
    answers = set()
    for task in tasks:
        content = task.messages[0]["content"]
        image = opened(content[0]["image"])
        cells = [(x, y) for y in (0, 16, 32) for x in (0, 16, 32)]
        colour, shape = content[1]["text"].removesuffix("s?").split()[2:]
        of_shape = [
            cell for cell in cells if (image.getpixel((cell[0] + 2, cell[1] + 2)) == (255,) * 3) == (shape == "circle")
        ]
        colours = [image.getpixel((x + 8, y + 8)) for x, y in of_shape]
        assert colours.count(ImageColor.getrgb(colour)) == task.payload["answer"]
        answers.add(task.payload["answer"])
    assert answers == {0, 1, 2, 3, 4}
    assert len({task.id for task in tasks}) == len(tasks)
    told, shown = list[str](), list[Path]()

    def answer(_: str) -> str:
        shown.append(Path(told[0].split("> ")[1]))
        assert opened(shown[-1].read_bytes()).size == (48, 48)
        if len(shown) == 2:
            raise EOFError
        return "none"

    tried = partial(
        try_environment, "count", {"grid": 3, "cell": 16, "most": 4, "images": 60}, ask=answer,
        tell=lambda each: told.append(str(each)),
    )  # fmt: skip
    assert tried().reward == 0.0
    assert told[1].startswith("     user> [image ")
    told.clear()
    with pytest.raises(EpisodeFailed, match="the input ended"):
        tried()
    assert len({each.parent for each in shown}) == 2
    assert not any(each.parent.exists() for each in shown)
