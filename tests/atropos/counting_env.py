"""Runs where atroposlib is: an environment of its own kind, on its own client loop. Nothing of Tandem is here.

    python counting_env.py URL TOKENIZER NAME GROUP_SIZE TOTAL_STEPS [MIN_BATCH_ALLOCATION]

Its policy counts; its bodies are large enough to be sent as gzip. Every score tells which item it is of.
"""

import asyncio
import sys
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

PROMPT, LENGTH = 8, 64


class CountingEnv(BaseEnv):
    name = "counting"

    async def setup(self) -> None:
        self.items = 0

    async def get_next_item(self) -> int:
        self.items += 1
        return self.items

    async def collect_trajectories(self, item: int) -> Any:
        await asyncio.sleep(0.02)
        size = self.config.group_size
        group = ScoredDataGroup()
        group["tokens"] = [[(item + i + k) % 200 for k in range(LENGTH)] for i in range(size)]
        group["masks"] = [[-100] * PROMPT + row[PROMPT:] for row in group["tokens"]]
        group["scores"] = [item + i / 100 for i in range(size)]
        group["inference_logprobs"] = [[1.0] * PROMPT + [-0.5] * (LENGTH - PROMPT)] * size
        group["advantages"] = None
        group["messages"] = [[{"role": "user", "content": f"count to {item}"}]] * size
        group["group_overrides"] = {}
        group["overrides"] = [{"temperature": 1.0}] * size
        group["images"] = None
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


def main(url: str, tokenizer: str, name: str, group_size: int, total_steps: int, minimum: float | None) -> None:
    config = BaseEnvConfig(
        rollout_server_url=url, tokenizer_name=tokenizer, wandb_name=name, use_wandb=False, group_size=group_size,
        total_steps=total_steps, max_token_length=256, max_num_workers=4, steps_per_eval=0, include_messages=True,
        min_batch_allocation=minimum,
    )  # fmt: skip
    server = APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False)
    asyncio.run(CountingEnv(config, [server]).env_manager())


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]) if len(sys.argv) > 6 else None)
