"""One name, one meaning: no two classes of src have one name, unless they are the same idea."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "tandem"
SAME_IDEA = {
    "Crew": "the ranks of a run, as the recipes ask for them and as train/ has them",
    "Event": "what happened, to a run of the control plane and to an online server",
    "Optimizer": "the protocol, and what all of ours share",
    "Ranks": "what two writers of files need of the ranks",
    "Run": "a run: its directory, and its row on the control plane",
    "Stream": "a mirrored file: what an agent is told of it, and its row",
    "Trainer": "the protocol, and the one that a user's own loop holds",
}


def test_no_two_classes_have_one_name():
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            found[name].append(str(path.relative_to(SRC)))
    twice = {name: sorted(places) for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SAME_IDEA} == {}
    assert twice.keys() == SAME_IDEA.keys()
