"""An environment of Atropos, as one writes it there; nothing of Tandem is here. docs/atropos.md runs it.

    python examples/atropos_env.py serve --env.tokenizer_name MODEL --openai.base_url URL/v1 ...

The reward is the share of vowels in the answer, so that a model that knows nothing learns something within a minute.
"""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

WORDS = ("sing", "hum", "shout", "whisper", "chant", "call", "murmur", "howl")


class VowelsEnv(BaseEnv):
    name = "vowels"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=8, max_token_length=24, max_num_workers=8, total_steps=100_000, steps_per_eval=0, use_wandb=False
        )
        return config, [APIServerConfig(model_name="policy", server_type="vllm")]

    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return f"{WORDS[self.count % len(WORDS)]} {self.count}"

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(answer.choices, nodes, strict=True):
            text = choice.message.content or ""
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(letter in "aeiou" for letter in text) / max(len(text), 1))
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    VowelsEnv.cli()
