"""Images in micro-batches: where they stand, at which positions, and which siblings may share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_packed_attention import by_spans
from torch import Tensor

from tandem.algo import sft
from tandem.errors import SpecError
from tandem.model.forward import Forward
from tandem.model.load_checkpoint import refuse_unfit
from tandem.ops import packed_attention
from tandem.ops.byte_sizes import shares_never
from tandem.ops.image_places import rotary_positions
from tandem.ops.lm_head import Head
from tandem.ops.vision import Vision
from tandem.train.batch_packing import make_batch
from tandem.types import ImageRows, MicroBatch, PlacedImage, Trajectory

PAD, CPU = 9, torch.device("cpu")
GRIDS = {"cat": (1, 4, 6), "dog": (1, 4, 6), "map": (1, 4, 4)}


class Drawn:
    """The images of a run; their pixels are drawn from their digests."""

    pad_id = PAD

    def grid(self, digest: str) -> tuple[int, int, int]:
        return GRIDS[digest]

    def length(self, digest: str) -> int:
        return GRIDS[digest][1] * GRIDS[digest][2] // 4

    def pixels(self, digest: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(digest) + ord(digest[0]))
        return torch.randn(self.length(digest) * 4, 3 * 2 * 4 * 4, generator=generator)

    def key(self, digest: str) -> str:
        return digest


IMAGES = Drawn()


def row(*parts: int | str, answer: int = 3) -> Trajectory:
    """Return a recorded answer after a prompt: so many tokens of text, and images."""
    ids, images = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, int):
            ids += [1 + (len(ids) + step) % 7 for step in range(part)]
        else:
            images.append(PlacedImage(part, len(ids), GRIDS[part], IMAGES.length(part)))
            ids += [PAD] * IMAGES.length(part)
    trained = [False] * len(ids) + [True] * answer
    ids += range(20, 20 + answer)
    return Trajectory(ids, trained, [0.0] * len(ids), [-1] * len(ids), images=images)


def packed(*groups: list[Trajectory], tree: bool = False) -> MicroBatch:
    shares: Any = (lambda apart, tree: True) if tree else shares_never
    batch = make_batch(groups, sft.make(), micro_tokens=1000, version=0, shares=shares, device=CPU)
    (micro,) = batch.micro
    return micro


def test_each_image_of_packed_rows_has_its_place_and_its_positions():
    rows = [row(4, "cat", 3, "map"), row(2, "dog", 2), row(5)]
    micro = packed(*([each] for each in rows))
    assert micro.images is not None
    assert (micro.ids_BT.flatten()[micro.images.places_P] == PAD).all()
    assert len(micro.images.places_P) == (micro.ids_BT == PAD).sum() == 16
    assert micro.images.digests == ["cat", "map", "dog"]
    for each in rows:
        ids, count = micro.ids_BT.flatten().tolist(), len(each.ids)
        begin = next(at for at in range(len(ids)) if ids[at : at + count] == each.ids)
        positions_3T, _ = rotary_positions(count, each.images, 2)
        found_3T = micro.images.rotary_3BT.flatten(1)[:, begin : begin + count]
        assert torch.equal(found_3T, positions_3T)
    assert packed([row(5)]).images is None


@pytest.mark.parametrize(
    ("others", "shared", "digests"),
    [
        (("cat", 3, "cat"), 4 + 6 + 3 + 6, ["cat", "cat"]),
        (("cat", 3, "dog"), 4 + 6 + 3, ["cat", "cat", "dog"]),  # equal ids
        (("dog", 3, "cat"), 4, ["cat", "cat", "dog", "cat"]),
        (("map", 5, "cat"), 4, ["cat", "cat", "map", "cat"]),
        ((3,), 4, ["cat", "cat"]),
    ],
)
def test_a_shared_prompt_ends_before_an_image_that_siblings_do_not_share(
    others: tuple[int | str, ...], shared: int, digests: list[str]
):
    siblings = [row(4, "cat", 3, "cat"), row(4, *others, answer=2)]
    micro = packed(siblings, tree=True)
    assert micro.ids_BT.numel() == sum(len(each.ids) for each in siblings) - shared
    assert micro.images is not None
    assert micro.images.digests == digests
    branch = rotary_positions(len(siblings[1].ids), siblings[1].images, 2)[0][:, shared:]
    assert torch.equal(micro.images.rotary_3BT[:, 0, -branch.shape[1] :], branch)


def seeing() -> Any:
    text = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "in_channels": 3,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, image_token_id=PAD, video_token_id=30)
    module = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for tensor in module.parameters():
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.2)
    return module.requires_grad_(False)


def test_features_are_put_at_places_in_any_order_and_not_where_the_model_said_an_images_token():
    module = seeing()
    head = Head(module, 32, Vision(module, IMAGES, cache_bytes=0))
    rows = [row(3, "cat", 2, "map"), row(2, "dog", 4)]
    width = max(len(each.ids) for each in rows)
    ids_BT = torch.tensor([[*each.ids, *[0] * (width - len(each.ids))] for each in rows])
    rotary = [rotary_positions(width, each.images, 2)[0] for each in rows]
    placed = [(at * width + image.offset, image) for at, each in enumerate(rows) for image in each.images]
    plain = [plain_hidden(module, each) for each in rows]
    causal = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
    for order in (placed, placed[::-1]):
        places_P = torch.cat([torch.arange(begin, begin + image.length) for begin, image in order])
        images = ImageRows(torch.stack(rotary, 1), places_P, [image.digest for _, image in order])
        found_BTH = head.hidden(ids_BT, torch.arange(width).expand(2, -1), causal, images=images)
        for found_TH, expected_TH in zip(found_BTH, plain, strict=True):
            assert torch.allclose(found_TH[: len(expected_TH)], expected_TH, atol=1e-5)
    said = ids_BT.clone()
    said[0, -1] = said[1, 0] = PAD
    found_BTH = head.hidden(said, torch.arange(width).expand(2, -1), causal, images=images)
    assert torch.allclose(found_BTH[0, :-1], plain[0][: width - 1], atol=1e-5)


def test_rows_without_masks_give_the_images_of_masked_ones(monkeypatch: pytest.MonkeyPatch):
    module = seeing()
    head = Head(module, 32, Vision(module, IMAGES))
    micro = packed([row(4, "cat", 3, "cat"), row(4, "cat", 3, "dog", 2)], [row(20)], [row(9, "map")], tree=True)
    assert micro.images is not None
    assert (micro.segments_BT[1] < 0).any()  # the third row's image is behind padding
    masked_TH, source_N = Forward(module, packed=False, compiled=False).hidden(head, micro)
    masked_NH = masked_TH[source_N]
    monkeypatch.setattr(packed_attention, "why_not", lambda module: "")
    monkeypatch.setattr(packed_attention, "kernel", by_spans)
    forward = Forward(module, packed=True, compiled=True, why_not_compiled="of a test")
    assert forward.why_masked == ""
    unmasked_TH, source_N = forward.hidden(head, micro)
    assert torch.allclose(unmasked_TH[source_N], masked_NH, atol=1e-5)


def plain_hidden(module: Any, each: Trajectory) -> Tensor:
    """Return the hidden states as transformers alone computes them; it finds images by their tokens."""
    ids_1T = torch.tensor([each.ids])
    module.model.rope_deltas = None
    out = module.model(
        ids_1T,
        pixel_values=torch.cat([IMAGES.pixels(image.digest) for image in each.images]),
        image_grid_thw=torch.tensor([image.grid for image in each.images]),
        mm_token_type_ids=(ids_1T == PAD).int(),
    )
    return out.last_hidden_state[0]


def test_a_tower_that_is_trained_has_no_cache_of_features():
    module = seeing()
    module.model.visual.requires_grad_(True)
    with pytest.raises(AssertionError, match="the vision tower is trained"):
        Vision(module, IMAGES)


def test_features_are_computed_once_until_the_cache_is_full():
    module = seeing()
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    module.model.visual.register_forward_hook(counted)
    vision = Vision(module, IMAGES, cache_bytes=2 * 6 * 32 * 4)
    whole = vision.features(["cat", "map", "cat"])
    assert (count, whole.embeds_PH.shape, [each.shape for each in whole.deep]) == (2, (16, 32), [(16, 32)])
    assert torch.equal(whole.embeds_PH[:6], whole.embeds_PH[10:])
    vision.features(["map"])
    assert count == 2
    vision.features(["cat"])  # which "map" had driven out
    assert count == 3


def test_models_that_see_in_other_ways_are_refused_by_name(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="qwen2_5_vl sees images in a way that is not supported"):
        refuse_unfit(str(tmp_path), "main")
