"""How the unmodified `openai` package sees requests that do not finish: errors, cancels, deadlines."""

import asyncio
import json
import logging
from pathlib import Path
from unittest.mock import patch

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from baton.errors import DeadlinePassed, Overloaded, RequestAborted, SlowReader
from baton.request import ErrorKind
from gateway.error_codes import INTERNAL_MESSAGE, codes_of
from gateway.http.errors import headers_of
from gateway.text import TokenizerPool
from tests.factories.gateway import (
    answering,
    beginning,
    failing,
    outputs_of,
    silent,
)
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_with, raw_events

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


async def test_a_client_that_leaves_in_mid_stream_ends_all_its_answers_on_all_workers(folder: Path) -> None:
    async with openai_with(folder, beginning(ANSWER[:1]), silent) as (under_test, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=2)
        workers = [under_test.workers[name] for name in ("p0", "d0")]
        ids = [sorted([(await worker.next_request()).request_id for _ in "ab"]) for worker in workers]
        await anext(aiter(answer))
        await answer.close()
        assert [sorted([await worker.next_abort() for _ in "ab"]) for worker in workers] == ids


async def test_an_error_in_mid_stream_is_an_event_and_the_end(folder: Path) -> None:
    fails_late = failing(ErrorKind.INVALID_REQUEST, "structured_output: it cannot go on", after=ANSWER[:3])
    async with openai_with(folder, fails_late) as (under_test, client):
        with pytest.raises(openai.APIError, match="it cannot go on") as caught:
            async for _ in await client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                pass
        assert caught.value.param == "response_format", "by the client's name for it"
        *_, last = await raw_events(under_test, HELLO)
        assert json.loads(last)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "breaks"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "openai.openai_answer.OpenAIAnswer.ending"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, "anthropic.message.MessageAnswer.ending"),
        ("/v1/responses", {"input": "Hello"}, "responses.respond.Responding._end_state"),
    ],
)
async def test_a_bug_in_mid_stream_tells_the_client_nothing_and_the_log_everything(
    folder: Path, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, object], breaks: str
) -> None:
    bug = patch(f"gateway.http.{breaks}", side_effect=RuntimeError("at 10.0.0.7"))
    async with openai_with(folder, answering(ANSWER)) as (under_test, _), under_test.http() as http:
        with bug, caplog.at_level(logging.ERROR):
            answer = await http.post(path, json={"model": "tiny", "stream": True} | body)
    assert INTERNAL_MESSAGE in answer.text
    assert "10.0.0.7" not in answer.text
    (record,) = [record for record in caplog.records if record.name == "gateway.http.generated"]
    assert answer.headers["x-request-id"] in record.getMessage()
    assert record.exc_info is not None


async def test_an_error_before_the_first_token_has_its_status(folder: Path) -> None:
    overloaded = failing(ErrorKind.OVERLOADED, "no room")
    async with openai_with(folder, overloaded, placement_timeout_s=0.2) as (_, client):
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, n=2)
            assert caught.value.type == "rate_limit_error"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.request_id


async def test_a_deadline_counts_from_the_request_however_many_prompts_it_brings(folder: Path) -> None:
    encode = TokenizerPool.encode

    async def slowly(pool: TokenizerPool, caller: str, text: str) -> tuple[int, ...]:
        await asyncio.sleep(0.2)
        return await encode(pool, caller, text)

    with patch.object(TokenizerPool, "encode", slowly):
        async with openai_with(folder, silent) as (under_test, client):
            asking = asyncio.create_task(
                client.completions.create(
                    model="tiny", prompt=["Hello"] * 4, extra_headers={"x-request-timeout-ms": "60000"}
                )
            )
            requests = [await under_test.workers["d0"].next_request() for _ in range(4)]
            assert all(request.timeout_s is not None and request.timeout_s < 59.3 for request in requests)
            asking.cancel()
            for _ in requests:
                await under_test.workers["d0"].next_abort()


async def test_a_client_may_name_its_request(folder: Path) -> None:
    async with openai_with(folder, silent) as (under_test, client):
        ask = client.chat.completions.create
        first = asyncio.create_task(ask(model="tiny", messages=HELLO, extra_body={"request_id": "mine-1"}))
        await under_test.workers["d0"].next_request()
        with pytest.raises(openai.BadRequestError, match="in use") as caught:
            await ask(model="tiny", messages=HELLO, extra_body={"request_id": "mine-1"})
        assert (caught.value.param, caught.value.request_id) == ("request_id", "mine-1")
        assert await under_test.client.abort("mine-1") == 1
        with pytest.raises(openai.APIStatusError, match="mine-1 was aborted") as ended:
            await first
        assert ended.value.code == "request_aborted"


async def test_the_name_of_a_request_ends_the_answers_to_all_of_its_prompts(folder: Path) -> None:
    """This holds even if the name is so long that no number fits behind it."""
    name = "m" * 128

    async with openai_with(folder, silent) as (under_test, client):
        asking = asyncio.create_task(
            client.completions.create(
                model="tiny", prompt=["Hello", "there"], extra_body={"request_id": name}
            )
        )
        d0 = under_test.workers["d0"]
        requests = {(await d0.next_request()).request_id for _ in "ab"}
        assert await under_test.client.abort(name) == 1
        with pytest.raises(openai.APIStatusError, match="was aborted"):
            await asking
        assert {await d0.next_abort() for _ in requests} == requests


async def test_the_name_of_a_request_ends_its_other_answers_when_the_first_is_complete(folder: Path) -> None:
    async with openai_with(folder, silent) as (under_test, client):
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="tiny", messages=HELLO, n=3, extra_body={"request_id": "three"}
            )
        )
        d0 = under_test.workers["d0"]
        requests = {
            request.request_id.split(".")[0]: request
            for request in [await d0.next_request() for _ in range(3)]
        }
        d0.say(requests["three"], outputs_of(requests["three"], ANSWER))
        await under_test.until(lambda: under_test.dispatcher.tally.counters["finished"] == 1)
        assert await under_test.client.abort("three") == 1
        with pytest.raises(openai.APIStatusError, match="three was aborted"):
            await asking
        others = {requests["three-1"].request_id, requests["three-2"].request_id}
        assert {await d0.next_abort() for _ in others} == others
        assert await under_test.client.abort("three") == 0


@pytest.mark.parametrize("error", [RequestAborted("ended"), SlowReader("slow"), DeadlinePassed("late")])
def test_openais_client_does_not_retry_requests_that_were_ended_on_purpose(error: RequestAborted) -> None:
    response = httpx2.Response(codes_of(error).http, headers=dict(headers_of(error)))
    client = openai.OpenAI(api_key="none")
    assert not client._should_retry(response)
    assert client._should_retry(httpx2.Response(codes_of(Overloaded("full", 1.0)).http))
