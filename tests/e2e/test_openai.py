"""The unmodified `openai` package against real workers: the same tokens as over gRPC, and nothing is left behind."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient
from tests.e2e.test_same_tokens import make_config
from tests.factories.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def with_http(config: BatonConfig) -> BatonConfig:
    values = config.model_dump(exclude_unset=True)
    values["gateway"]["http_port"] = 0
    return BatonConfig.from_mapping(values)


def test_openais_client_is_served_by_real_workers(folder: Path) -> None:
    async def run() -> None:
        async with (
            child_processes(with_http(make_config()), folder) as running,
            GatewayClient(running.target) as grpc,
            AsyncOpenAI(
                base_url=f"http://127.0.0.1:{running.gateway.http_port}/v1", api_key="none", max_retries=0
            ) as client,
        ):
            model = (await client.models.list()).data[0].id
            cluster = LocalCluster(grpc, running.workers)
            await same_tokens_as_over_grpc(client, cluster, model)
            await prompt_logprobs_are_those_of_transformers(client, model, folder)
            await samples_differ_and_come_again(client, model)
            await answers_match_what_is_asked_for(client, model)
            await leaving_frees_everything(client, cluster, model)

    asyncio.run(run())


async def same_tokens_as_over_grpc(client: AsyncOpenAI, cluster: LocalCluster, model: str) -> None:
    prompt = [*range(3, 60)]
    for mode in ("disaggregated", "local"):
        over_grpc = await cluster.answer(prompt, mode, temperature=0.0, max_tokens=24, ignore_eos=True)
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            temperature=0,
            max_tokens=24,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "routing_mode": mode, "cache_salt": mode},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == over_grpc.text
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
        for chunk in chunks[:-1]:
            logprobs: Any = chunk.choices[0].logprobs
            for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
                assert logprob == max(top.values()), "greedy takes the likeliest"


async def prompt_logprobs_are_those_of_transformers(client: AsyncOpenAI, model: str, folder: Path) -> None:
    """The request is like those of evaluation harnesses. The prompt takes three steps; the second time, its
    blocks are cached."""
    prompt = [(7 * i + 3) % 300 for i in range(290)]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs_TV = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = logprobs_TV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    for mode in ("disaggregated", "disaggregated", "local"):
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=1, logprobs=1, echo=True, extra_body={"routing_mode": mode}
        )
        logprobs: Any = answer.choices[0].logprobs
        assert len(logprobs.tokens) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-3)


async def samples_differ_and_come_again(client: AsyncOpenAI, model: str) -> None:
    async def texts(n: int) -> list[str | None]:
        answer = await client.chat.completions.create(
            model=model, messages=MESSAGES, n=n, seed=3, temperature=1.0, max_completion_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    three = await texts(3)
    assert len(set(three)) == 3
    assert await texts(3) == three
    assert await texts(1) == three[:1]


async def answers_match_what_is_asked_for(client: AsyncOpenAI, model: str) -> None:
    async def text(**options: Any) -> str:
        answer = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_completion_tokens=60, seed=1, **options
        )
        return answer.choices[0].message.content or ""

    format_ = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    assert json.loads(await text(response_format=format_))["city"] in ("Paris", "Rome")
    choices = ["a b", "c.d (e)", "\u00e9\n"]
    assert await text(extra_body={"structured_outputs": {"choice": choices}}) in choices
    with pytest.raises(openai.BadRequestError, match="unclosed group") as caught:
        await text(extra_body={"structured_outputs": {"regex": "(yes"}})
    assert caught.value.param == "structured_outputs"


async def leaving_frees_everything(client: AsyncOpenAI, cluster: LocalCluster, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        n=4,
        max_completion_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    await stream.close()
    await cluster.at_rest()
    with pytest.raises(openai.InternalServerError, match="deadline passed"):
        await client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_completion_tokens=900,
            extra_headers={"x-request-timeout-ms": "100"},
            extra_body={"ignore_eos": True},
        )
    await cluster.at_rest()
