"""Two workers, each with its shard: together they hold every tensor once, and say so."""

from __future__ import annotations

from typing import Any

import torch
from test_vllm_engine import NEAR, Rig
from vllm_cpu import adapted, small_model


def test_shards_add_up_where_heads_are_split_and_where_they_are_replicated(tmp_path: Any):
    """One head of keys and values for two workers: both hold it."""
    module = small_model(dtype=torch.float32, num_key_value_heads=1, vocab_size=198, eos_token_id=None)
    module.save_pretrained(tmp_path)
    rig = Rig(tmp_path, module, tensor_parallel=2)
    try:
        for mode in ("adapter", "broadcast"):
            bridge = rig.bridge(mode)
            if mode == "adapter":
                trained = adapted(module, seed=1)
            else:
                trained = small_model(
                    seed=1, dtype=torch.float32, num_key_value_heads=1, vocab_size=198, eos_token_id=None
                )
            sent, served = rig.publish(bridge, trained)
            assert sent.fingerprints == served.fingerprints
            assert rig.gap(trained, rig.sample()) < NEAR
            bridge.close()
    finally:
        rig.close()
