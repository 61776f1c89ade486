"""Affinity keys: requests of one key go to one worker, by every API that has keys."""

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from baton.request import EngineRequest, RequestOutput
from gateway import GatewayError
from tests.factories.gateway import GatewayUnderTest, Script, answering, gateway_with
from tests.factories.openai import openai_for

NUM_WORKERS, NUM_KEYS, NUM_TURNS = 4, 4, 3
SAID = (7, 8)

Turn = Callable[[GatewayUnderTest, str, int], Awaitable[None]]


async def by_chat(under_test: GatewayUnderTest, key: str, turn: int) -> None:
    async with openai_for(under_test) as client:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"turn {turn}"}], prompt_cache_key=key
        )


async def by_completion(under_test: GatewayUnderTest, key: str, turn: int) -> None:
    async with openai_for(under_test) as client:
        await client.completions.create(
            model="tiny", prompt=f"turn {turn}", extra_body={"prompt_cache_key": key}
        )


async def by_response(under_test: GatewayUnderTest, key: str, turn: int) -> None:
    async with openai_for(under_test) as client:
        response = await client.responses.create(
            model="tiny", input=f"turn {turn}", store=False, prompt_cache_key=key
        )
        assert response.prompt_cache_key == key


async def by_grpc(under_test: GatewayUnderTest, key: str, turn: int) -> None:
    await under_test.ask(f"turn {turn}", affinity_key=key)


@pytest.mark.parametrize("turn_by", [by_chat, by_completion, by_response, by_grpc])
async def test_turns_of_one_key_go_to_one_worker(folder: Path, turn_by: Turn) -> None:
    asked: dict[str, Counter[str]] = {}

    def counting(name: str) -> Script:
        answer = answering(list(SAID))

        def script(request: EngineRequest) -> list[RequestOutput]:
            asked[key][name] += 1
            return answer(request)

        return script

    decodes = {f"d{number}": counting(f"d{number}") for number in range(NUM_WORKERS)}
    async with gateway_with(
        folder, {}, decodes, routing_mode="local", routing_policy="round_robin"
    ) as under_test:
        for key in [f"conversation {number}" for number in range(NUM_KEYS)]:
            asked[key] = Counter()
            for turn in range(NUM_TURNS):
                await turn_by(under_test, key, turn)
    assert all(list(counts.values()) == [NUM_TURNS] for counts in asked.values()), asked
    assert len({worker for counts in asked.values() for worker in counts}) > 1, "keys are spread"


async def test_a_key_has_a_bound(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(list(SAID))}, routing_mode="local") as under_test:
        with pytest.raises(
            GatewayError, match=r"affinity_key: must have at most 1024 characters, got 1025"
        ) as refused:
            await by_grpc(under_test, "x" * 1025, 0)
        assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT.name
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "x"}],
            "prompt_cache_key": "x" * 1025,
        }
        async with under_test.http() as client:
            answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_cache_key")
