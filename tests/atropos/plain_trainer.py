"""Runs where atroposlib is: registers and polls for batches with the calls that atroposlib ships (`cli/sft.py`).

python plain_trainer.py URL STEPS GROUP_SIZE GROUPS        one JSON line a batch
"""

import asyncio
import json
import sys

from atroposlib.cli.sft import check_for_batch, register_to_api


async def main(url: str, steps: int, group_size: int, groups: int) -> None:
    await register_to_api(group_size, 256, url, steps, groups)
    for _ in range(steps):
        batch = await check_for_batch(url)
        for item in batch:  # as their trainers read it, without asking whether a key is there
            assert item["overrides"] is None or [each.get("temperature", 1.0) for each in item["overrides"]]
            assert len(item["tokens"]) == len(item["masks"]) == len(item["scores"]) == len(item["inference_logprobs"])
        groups_of = [[item["env_id"], len(item["tokens"]), item["scores"][0]] for item in batch]
        print("BATCH " + json.dumps({"groups": groups_of, "keys": sorted(batch[0])}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *(int(each) for each in sys.argv[2:5])))
