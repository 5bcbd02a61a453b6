"""The Atropos form of a group (`ScoredData`): check a post once, store its bytes, return them without encoding again.

For an Atropos trainer a group is stored as `b"TAT1"`, the trainer's version (int64, little endian) and a JSON object
with all 14 keys, null where the post had none; the trainer gets these objects one after another. For a native trainer
`to_group` translates a post, and it is stored in the native form. A post carries no versions: a token whose version
absent_column proves has UNKNOWN_VERSION.

msgspec reads the numbers once, checks the range of ids and refuses what is not a number. Also refused: NaN and
infinity, numbers beyond float64, lone surrogates, bytes that are not UTF-8, and endless nesting.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tandem.errors import GroupRefused
from tandem.rollout.wire.codec import GroupHead, TrajectoryHead, WireGroup, decode, encode
from tandem.rollout.wire.validation import check_whole
from tandem.types import MAX_NUMBER, NO_VERSION, UNKNOWN_VERSION, Group, Trajectory

MAGIC = b"TAT1"
MASKED = -100
"""In `masks`: this token is not trained. For a trained token `masks` repeats the id."""
MASKED_LOGPROB = 1.0
MAX_ID = 2**20 - 1
"""Above every known vocabulary."""
MAX_GROUP = 4096
_ABOVE_ONE = 1e-3
"""How far a logprob may exceed 0 by rounding."""
_PREFIX = struct.Struct("<4sq")

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Label: TypeAlias = Annotated[int, msgspec.Meta(ge=MASKED, le=MAX_ID)]
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Small enough for sums over a batch."""
Text: TypeAlias = dict[str, Any]


class ScoredData(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[list[Id]]
    masks: list[list[Label]]
    scores: list[Number]
    advantages: list[list[Number]] | UnsetType | None = UNSET
    ref_logprobs: list[list[Number]] | UnsetType | None = UNSET
    messages: list[list[Text]] | UnsetType | None = UNSET
    generation_params: Text | UnsetType | None = UNSET
    inference_logprobs: list[list[Number]] | UnsetType | None = UNSET
    overrides: list[Text] | UnsetType | None = UNSET
    group_overrides: Text | UnsetType | None = UNSET
    images: Any | UnsetType = UNSET
    env_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] | UnsetType | None = UNSET
    distill_token_ids: list[list[list[Id]]] | UnsetType | None = UNSET
    distill_logprobs: list[list[list[float]]] | UnsetType | None = UNSET


KEYS = ScoredData.__struct_fields__
_BY_SEQUENCE = (
    "advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "distill_token_ids",
    "distill_logprobs",
)  # fmt: skip
_one = msgspec.json.Decoder(ScoredData)
_raw_list = msgspec.json.Decoder(list[Raw])
_raw_object = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class Scored:
    """A checked post of one group."""

    posted: memoryview
    """The posted JSON object without its closing brace."""
    rest: bytes
    """The keys that it lacks, as null, and the closing brace: together all 14 keys."""
    data: ScoredData

    @property
    def env_id(self) -> int | None:
        return None if self.data.env_id is UNSET else self.data.env_id

    @property
    def size(self) -> int:
        return len(self.data.scores)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.data.tokens]

    @property
    def has_logprobs(self) -> bool:
        return bool(self.data.inference_logprobs)

    def as_posted(self) -> bytes:
        return b"".join((self.posted, self.rest))

    def stored(self, version: int, environment: int) -> WireGroup:
        """Return the form that the queue stores for an Atropos trainer; `version` is the trainer's."""
        lengths = self.lengths
        heads = [
            TrajectoryHead(length, reward=score, spans=[(version, length)])
            for length, score in zip(lengths, self.data.scores, strict=True)
        ]
        frame = b"".join((_PREFIX.pack(MAGIC, version), self.posted, self.rest))
        head = GroupHead(heads, environment=environment)
        return WireGroup(frame, head, self.size, sum(lengths), max(lengths), 0, oldest=version, newest=version)


def read_one(body: bytes) -> Scored:
    """Read the body of a `/scored_data`; GroupRefused names the wrong field."""
    return _read(body, "")


def read_list(body: bytes, max_groups: int = MAX_GROUP) -> list[Scored]:
    """Read the body of a `/scored_data_list`."""
    posts = _split_list(body)
    if posts is None:
        try:
            posts = [bytes(post) for post in _raw_list.decode(body)]
        except Exception as error:  # noqa: BLE001 - RecursionError, UnicodeDecodeError: parser errors on bad bytes
            raise why_refused(error, body) from None
    if len(posts) > max_groups:
        raise GroupRefused("body", f"{len(posts)} groups in one post; {max_groups} at most")
    return [_read(post, f"{index}.") for index, post in enumerate(posts)]


def _split_list(body: bytes) -> list[bytes] | None:
    """Split a list into its objects by their braces, if no object is nested; otherwise None. Parsing the list only to
    split it would take as long as parsing the objects."""
    posts, end = list[bytes](), 0
    while (start := body.find(b"{", end)) >= 0:
        before = b"," if posts else b"["
        if body[end:start].strip() != before:
            return None
        end = body.find(b"}", start) + 1
        if not end or body.find(b"{", start + 1, end) >= 0:
            return None
        posts.append(body[start:end])
    return posts if posts and body[end:].strip() == b"]" else None


def _read(body: bytes, place: str) -> Scored:
    try:
        data = _one.decode(body)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise why_refused(error, body, place) from None
        return _read(_rewritten(body, place), place)  # Atropos ignores unknown fields
    except Exception as error:  # noqa: BLE001 - as above
        raise why_refused(error, body, place) from None
    if any(getattr(data, name) == [] for name in _BY_SEQUENCE):
        # Atropos environments send [] for "none had any", and the Atropos trainer then indexes into it.
        return _read(_rewritten(body, place, empty=True), place)
    _check(data, place)
    absent = "".join(f',"{name}":null' for name in KEYS if getattr(data, name) is UNSET)
    posted = memoryview(body)[: body.rindex(b"}")]
    return Scored(posted, absent.encode() + b"}", data)


def _rewritten(body: bytes, place: str, *, empty: bool = False) -> bytes:
    """Return the object without unknown keys, or without empty lists."""
    try:
        raw = _raw_object.decode(body)
    except Exception as error:  # noqa: BLE001 - as above
        raise why_refused(error, body, place) from None
    kept = [
        b'"%s":%s' % (name.encode(), bytes(raw[name]))
        for name in KEYS
        if name in raw and not (empty and name in _BY_SEQUENCE and not bytes(raw[name]).strip(b"[] \t\r\n"))
    ]
    return b"{" + b",".join(kept) + b"}"


# --- checks across fields


def _check(data: ScoredData, place: str) -> None:
    size = len(data.tokens)
    if not 1 <= size <= MAX_GROUP:
        raise GroupRefused(f"{place}tokens", f"a group of {size} sequences; must be 1 to {MAX_GROUP}")
    for name in ("masks", "scores", *_BY_SEQUENCE):
        given = getattr(data, name)
        if given is not UNSET and given is not None and len(given) != size:
            raise GroupRefused(f"{place}{name}", f"has {len(given)} entries, and tokens has {size}")
    masked = [
        _check_labels(f"{place}masks.{index}", labels, ids)
        for index, (labels, ids) in enumerate(zip(data.masks, data.tokens, strict=True))
    ]
    if data.inference_logprobs:
        for index, logprobs in enumerate(data.inference_logprobs):
            _check_logprobs(f"{place}inference_logprobs.{index}", logprobs, data.masks[index], masked[index])
    for name in ("advantages", "ref_logprobs"):
        for index, row in enumerate(getattr(data, name) or ()):
            _same_length(f"{place}{name}.{index}", row, data.tokens[index])
    _check_messages(data, place)
    _check_overrides(data, place)
    _check_distilled(data, place)
    if data.images is not UNSET:
        _check_numbers(data.images, f"{place}images")


def _same_length(field: str, row: Sequence[Any], ids: list[int]) -> None:
    if len(row) != len(ids):
        raise GroupRefused(field, f"has {len(row)} entries, and its sequence {len(ids)} tokens")


def _check_labels(field: str, labels: list[int], ids: list[int]) -> int:
    """Return how many labels are masked. Nearly always these are the first ones, so slices compare fast."""
    if not ids:
        raise GroupRefused(field.replace("masks", "tokens"), "is empty; a sequence needs tokens")
    _same_length(field, labels, ids)
    count = labels.count(MASKED)
    if labels[count:] != ids[count:]:
        if set(labels) <= {0, 1}:
            raise GroupRefused(
                field,
                f"holds 0 and 1; it must hold the token's id where it is trained, and {MASKED} elsewhere. In the "
                f"environment: masks = [id if one else {MASKED} for id, one in zip(tokens, masks)]",
            )
        for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (MASKED, token):
                raise GroupRefused(f"{field}.{index}", f"is {label}; it must be {MASKED} or the token's id {token}")
    return count


def _check_logprobs(field: str, logprobs: list[float], labels: list[int], masked: int) -> None:
    """Check logprobs. A masked token may keep its true logprob, so that masking needs no rewriting."""
    _same_length(field, logprobs, labels)
    begins = labels[:masked].count(MASKED) == masked
    if begins and logprobs[:masked].count(MASKED_LOGPROB) == masked and max(logprobs[masked:], default=0) <= 0:
        return
    for index, (value, label) in enumerate(zip(logprobs, labels, strict=True)):
        if value > _ABOVE_ONE and not (label == MASKED and value == MASKED_LOGPROB):
            must = f"{MASKED_LOGPROB} or " if label == MASKED else ""
            raise GroupRefused(f"{field}.{index}", f"is {value}; it must be {must}a logprob, which is not above 0")


def _check_messages(data: ScoredData, place: str) -> None:
    for index, conversation in enumerate(data.messages or ()):
        for turn, message in enumerate(conversation):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise GroupRefused(f"{place}messages.{index}.{turn}", "must have a role (text) and a content")
            _check_numbers(message, f"{place}messages.{index}.{turn}")


def _check_overrides(data: ScoredData, place: str) -> None:
    for field, values in (
        *((f"overrides.{index}", each) for index, each in enumerate(data.overrides or ())),
        ("group_overrides", data.group_overrides or {}),
        ("generation_params", data.generation_params or {}),
    ):
        _check_numbers(values, f"{place}{field}")
        for name, kinds in (("temperature", (int, float)), ("group_size", (int,)), ("set_advantage_to_zero", (bool,))):
            value = values.get(name)
            if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise GroupRefused(f"{place}{field}.{name}", f"is {str(value)[:40]!r}; it must be {_named(kinds)}")


def _check_numbers(value: Any, field: str) -> None:
    """Refuse whole numbers of more than 64 bits: later readers may not support them."""
    if isinstance(value, int):
        check_whole(value, field)
    elif isinstance(value, dict | list):
        inside = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        for each in inside:
            _check_numbers(each, field)


def _named(kinds: tuple[type, ...]) -> str:
    return {int: "a whole number", bool: "true or false"}.get(kinds[-1], "a number")


def _check_distilled(data: ScoredData, place: str) -> None:
    ids, logprobs = data.distill_token_ids or None, data.distill_logprobs or None
    if (ids is None) != (logprobs is None):
        missing = "distill_token_ids" if ids is None else "distill_logprobs"
        raise GroupRefused(f"{place}{missing}", "is missing: distill_token_ids and distill_logprobs must both be set")
    if ids is None or logprobs is None:
        return
    for index, (ids_TK, logprobs_TK) in enumerate(zip(ids, logprobs, strict=True)):
        _same_length(f"{place}distill_token_ids.{index}", ids_TK, data.tokens[index])
        _same_length(f"{place}distill_logprobs.{index}", logprobs_TK, data.tokens[index])
        for position, (few, their) in enumerate(zip(ids_TK, logprobs_TK, strict=True)):
            if len(few) != len(their):
                field = f"{place}distill_logprobs.{index}.{position}"
                raise GroupRefused(field, f"has {len(their)} entries for {len(few)} ids")


# --- parser errors in terms of the post

_PATH = re.compile(r"`\$([^`]*)`\s*$")
_NAMED = re.compile(r"field `([^`]*)`")
_OFFSET = re.compile(r"\(byte (\d+)\)")
_LONE = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..)")
_SHAPES = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_DEEP = 64


def why_refused(error: Exception, body: bytes, place: str = "", keys: Sequence[str] = KEYS) -> GroupRefused:
    """Turn a parser's error into one for the client: the field, and what is wrong with it."""
    text = str(error)

    def field_at(offset: int) -> str:
        """Return the last key before the offset."""
        at, name = max((body.rfind(b'"%s"' % key.encode(), 0, offset), key) for key in keys)
        return place + (name if at >= 0 else "body")

    if isinstance(error, RecursionError):
        return GroupRefused(field_at(_depth_at(body)), "is nested too deeply")
    if isinstance(error, msgspec.ValidationError):
        path = found.group(1) if (found := _PATH.search(text)) else ""
        named = found.group(1) if (found := _NAMED.search(text)) else ""
        field = ".".join(part for part in (re.sub(r"\[(\d+|\.\.\.)\]", r".\1", path).strip("."), named) if part)
        return GroupRefused(place + (field or "body"), _PATH.sub("", text).removesuffix(" - at ").lower() or text)
    if isinstance(error, UnicodeDecodeError):
        return GroupRefused(field_at(_not_text_at(body)), "is not UTF-8")
    if found := _LONE.search(body):
        return GroupRefused(field_at(found.start()), "has half of a surrogate pair")
    offset = int(found.group(1)) if (found := _OFFSET.search(text)) else len(body)
    word = body[max(0, offset - 1) : offset + 9].lstrip(b"-, [:")
    if word.startswith((b"NaN", b"Inf", b"aN", b"nf")):
        return GroupRefused(field_at(offset), "is NaN or infinite; numbers must be finite")
    return GroupRefused(field_at(offset), text[:200])


def _not_text_at(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(body)


def _depth_at(body: bytes) -> int:
    depth = 0
    for found in _SHAPES.finditer(body):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found.group(), 0)
        if depth > _DEEP:
            return found.start()
    return len(body)


# --- conversion


def is_scored(frame: bytes | memoryview) -> bool:
    return bytes(frame[:4]) == MAGIC


def as_posted(frame: bytes | memoryview) -> memoryview:
    """Return the JSON object of a stored group."""
    return memoryview(frame)[_PREFIX.size :]


def to_group(data: ScoredData) -> Group:
    """Convert a post to a native group. Versions are unknown; logprobs that the post lacks are 0."""
    absent_column = [None] * len(data.tokens)
    columns = tuple(
        each or absent_column for each in (data.inference_logprobs, data.messages, data.overrides, data.advantages)
    )
    return [_trajectory(*row) for row in zip(data.tokens, data.masks, data.scores, *columns, strict=True)]


def _trajectory(
    ids: list[int],
    labels: list[int],
    score: float,
    logprobs: list[float] | None,
    messages: list[Text] | None,
    overrides: Text | None,
    advantages: list[float] | None,
) -> Trajectory:
    counts = not (overrides or {}).get("set_advantage_to_zero", False)
    trained = [counts and label != MASKED for label in labels]
    known = logprobs or [0.0] * len(ids)
    return Trajectory(
        ids, trained,
        [min(value, 0.0) if one else 0.0 for value, one in zip(known, trained, strict=True)],
        [UNKNOWN_VERSION if one else NO_VERSION for one in trained],
        reward=score, messages=list(messages or ()), advantages=list(advantages or ()),
    )  # fmt: skip


def native(frame: bytes, environment: int) -> bytes:
    """Return a stored group as a frame of the native wire form."""
    if not is_scored(frame):
        return frame
    return bytes(encode(to_group(_one.decode(as_posted(frame))), environment=environment).frame)


def posted(frame: bytes | memoryview, env_id: int | None) -> bytes | memoryview:
    """Return a stored group as an Atropos JSON object."""
    return as_posted(frame) if is_scored(frame) else from_group(decode(frame), env_id)


def from_group(group: Group, env_id: int | None) -> bytes:
    """Convert a native group to an Atropos JSON object."""
    data = ScoredData(
        tokens=[each.ids for each in group],
        masks=[
            [token if one else MASKED for token, one in zip(each.ids, each.trained, strict=True)] for each in group
        ],
        scores=[each.reward for each in group],
        inference_logprobs=[
            [value if one else MASKED_LOGPROB for value, one in zip(each.logprobs, each.trained, strict=True)]
            for each in group
        ],
        messages=[[dict(message) for message in each.messages] for each in group] if group[0].messages else None,
        env_id=env_id,
    )  # fmt: skip
    return msgspec.json.encode({name: None if (value := getattr(data, name)) is UNSET else value for name in KEYS})
