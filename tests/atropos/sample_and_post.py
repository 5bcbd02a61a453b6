"""Runs where atroposlib is: samples with one of its servers, posts what it got as an environment would.

    python sample_and_post.py GATEWAY TOKEN MODEL TOKENIZER ROLLOUTS ENV_ID SERVER_TYPE...

vllm and sglang through managed_server(), in two turns; openai through chat completions, without logprobs.
"""

import asyncio
import sys

import requests
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from transformers import AutoTokenizer

ASKED = [{"role": "user", "content": "sing"}]


async def managed(server: ServerManager, tokenizer: AutoTokenizer) -> dict:
    async with server.managed_server(tokenizer=tokenizer) as sampler:
        first = await sampler.chat_completion(messages=ASKED, n=1, max_tokens=8, temperature=1.0)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        more = [*ASKED, said, {"role": "user", "content": "again"}]
        await sampler.chat_completion(messages=more, n=1, max_tokens=8, temperature=1.0)
        nodes = sampler.get_state()["nodes"]
    return {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "inference_logprobs": [node.logprobs for node in nodes],
        "scores": [1.0] * len(nodes),
    }


async def chat(server: ServerManager, tokenizer: AutoTokenizer) -> dict:
    answer = await server.chat_completion(messages=ASKED, n=2, max_tokens=8, temperature=1.0)
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    sampled = [tokenizer.encode(each.message.content, add_special_tokens=False) for each in answer.choices]
    return {
        "tokens": [prompt + ids for ids in sampled],
        "masks": [[-100] * len(prompt) + ids for ids in sampled],
        "scores": [1.0, 0.0],
    }


def main(gateway: str, token: str, model: str, tokenizer: str, rollouts: str, env_id: str, *kinds: str) -> None:
    names = AutoTokenizer.from_pretrained(tokenizer)
    for number, kind in enumerate(kinds):
        config = APIServerConfig(
            server_type=kind, base_url=f"{gateway}/v1", api_key=token, model_name=model, tokenizer_name=tokenizer,
            health_check=False,
        )  # fmt: skip
        sample = chat if kind == "openai" else managed
        group = asyncio.run(sample(ServerManager([config]), names))
        group |= {"env_id": int(env_id), "generation_params": {"number": number}}  # equal bytes would be one post
        answer = requests.post(f"{rollouts}/scored_data", json=group, timeout=30)
        print(kind, answer.status_code, answer.text)
        answer.raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
