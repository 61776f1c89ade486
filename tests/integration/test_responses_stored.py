"""Stored responses: read, listed, ended and deleted by their caller alone; shared by gateways through a real Redis."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from baton.clock import VirtualClock
from baton.config import BatonConfig, GatewayConfig
from baton.errors import ConfigError, StoreUnavailable
from baton.request import EngineRequest, FinishReason, RequestOutput
from cluster.serve.gateway import check_access
from gateway.http.responses.store import MemoryStore
from gateway.http.responses.stores import store_for
from tests.factories.api_keys import ALICE, API_KEYS, BOB
from tests.factories.gateway import GatewayUnderTest, beginning, gateway_with, outputs_of, silent
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_with
from tests.factories.redis_server import redis_server

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids


def says(request: EngineRequest) -> list[RequestOutput]:
    return outputs_of(request, ANSWER, finish=FinishReason.STOP)


begins = beginning(ANSWER[:3])


@asynccontextmanager
async def client_of(under_test: GatewayUnderTest, key: str) -> AsyncIterator[AsyncOpenAI]:
    url = f"{under_test.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


async def test_a_response_is_kept_and_deleted(folder: Path) -> None:
    async with openai_with(folder, says) as (_, client):
        made = await client.responses.create(model="tiny", input="Hello", metadata={"a": "b"})
        kept = await client.responses.retrieve(made.id)
        assert kept.to_dict() == made.to_dict()
        Response.model_validate(kept.to_dict())
        async with client.responses.stream(model="tiny", input="Hello") as stream:
            async for _event in stream:
                pass
            last = await stream.get_final_response()
        again = await client.responses.retrieve(last.id)
        assert (again.output_text, again.usage, again.status) == (last.output_text, last.usage, last.status)
        await client.responses.delete(made.id)
        for call in (
            client.responses.retrieve(made.id),
            client.responses.delete(made.id),
            client.responses.cancel(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="More", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"


async def test_what_must_not_be_stored_is_not(folder: Path) -> None:
    async with openai_with(folder, says) as (_, client):
        made = await client.responses.create(model="tiny", input="Hello", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_a_gateway_may_keep_nothing(folder: Path) -> None:
    async with openai_with(folder, says, response_store="none") as (_, client):
        made = await client.responses.create(model="tiny", input="Hello")
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match="response_store: none"):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="store: this gateway keeps no responses"):
            await client.responses.create(model="tiny", input="Hello", store=True)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="tiny", input="Hello", previous_response_id=made.id)


async def test_input_items_are_listed_a_page_at_a_time(folder: Path) -> None:
    turns: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
    async with openai_with(folder, says) as (_, client):
        made = await client.responses.create(model="tiny", input=turns)
        found = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
        texts = [item.content[0].text for item in found if item.type == "message"]  # type: ignore[union-attr]
        assert texts == ["0", "1", "2", "3", "4"]
        newest = (await client.responses.input_items.list(made.id, limit=2)).to_dict()
        ends = (newest["first_id"], newest["last_id"], newest["has_more"])
        assert ends == (found[-1].id, found[-2].id, True)
        for fields in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_nope"}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.input_items.list(made.id, **fields)
        again: Any = [{"type": "item_reference", "id": found[0].id}, {"role": "user", "content": "x"}]
        await client.responses.create(model="tiny", input=again)


async def test_other_paths_of_the_api_are_no_stored_responses(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": says}) as under_test,
        under_test.http() as client,
    ):
        for method in ("GET", "DELETE"):
            answer = await client.request(method, "/v1/responses/input_tokens")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        for method in ("POST", "GET", "DELETE"):
            answer = await client.request(method, "/v1/responses/compact", json={})
            path = f"{method} /v1/responses/compact: Not Found"
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, path)


async def test_nobody_gets_anything_of_another_callers_responses(folder: Path) -> None:
    """Neither guessed ids nor error messages reveal anything."""
    async with (
        gateway_with(folder, {}, {"d0": says}, api_keys=API_KEYS) as under_test,
        client_of(under_test, ALICE) as alice,
        client_of(under_test, BOB) as bob,
    ):
        made = await alice.responses.create(model="tiny", input="Hello")
        item = made.output[0].id
        assert item is not None

        def calls(response_id: str, item_id: str) -> list[Any]:
            reference: Any = [{"type": "item_reference", "id": item_id}]
            return [
                bob.responses.retrieve(response_id),
                bob.responses.delete(response_id),
                bob.responses.cancel(response_id),
                bob.responses.input_items.list(response_id),
                bob.responses.create(model="tiny", input="x", previous_response_id=response_id),
                bob.responses.create(model="tiny", input=reference),
                bob.responses.input_tokens.count(input="x", previous_response_id=response_id),
            ]

        nobodys = made.id.replace("resp_", "resp_0")
        for hers, none in zip(calls(made.id, item), calls(nobodys, "msg_0_0"), strict=True):
            said = []
            for call in (hers, none):
                with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as caught:
                    await call
                said.append((caught.value.status_code, caught.value.message))
            (status, words), (other_status, other_words) = said
            assert status == other_status
            assert words.replace(made.id, "ID").replace(item, "ITEM") == other_words.replace(
                nobodys, "ID"
            ).replace("msg_0_0", "ITEM")
        assert (await alice.responses.retrieve(made.id)).id == made.id


async def refusal_to_cancel(client: openai.AsyncOpenAI, response_id: str) -> openai.BadRequestError:
    """The refusal to cancel a response that has ended, which may be a moment after its last event."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.responses.cancel(response_id)
            except openai.BadRequestError as error:
                return error


async def test_a_running_response_is_ended_by_its_caller(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": begins}, api_keys=API_KEYS) as under_test:
        async with client_of(under_test, ALICE) as alice, client_of(under_test, BOB) as bob:
            stream = await alice.responses.create(model="tiny", input="Hello", stream=True)
            first = await anext(aiter(stream))
            assert first.type == "response.created"
            with pytest.raises(openai.NotFoundError):
                await bob.responses.cancel(first.response.id)
            cancelled = await alice.responses.cancel(first.response.id)
            assert cancelled.status == "cancelled"
            events = [event async for event in stream]
            assert events[-1].type == "response.failed"
            assert events[-1].response.status == "cancelled"
            assert (await alice.responses.retrieve(cancelled.id)).to_dict() == cancelled.to_dict()
            assert "has ended (cancelled)" in str(await refusal_to_cancel(alice, cancelled.id))
        await under_test.workers["d0"].next_request()
        await under_test.workers["d0"].next_abort()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_that_is_ended_before_its_first_token_is_kept_as_cancelled(
    folder: Path, is_stream: bool
) -> None:
    async with openai_with(folder, silent) as (under_test, client):
        creating = asyncio.create_task(client.responses.create(model="tiny", input="Hello", stream=is_stream))
        request = await under_test.workers["d0"].next_request()
        response_id = f"resp_{request.request_id.partition('.')[0]}"
        assert (await client.responses.cancel(response_id)).status == "cancelled"
        with pytest.raises(openai.APIStatusError) as caught:
            await creating
        assert caught.value.status_code == 410
        assert (await client.responses.retrieve(response_id)).status == "cancelled"


async def test_a_client_that_leaves_leaves_nothing(folder: Path) -> None:
    async with openai_with(folder, begins) as (under_test, client):
        stream = await client.responses.create(model="tiny", input="Hello", stream=True)
        first = await anext(aiter(stream))
        await stream.close()
        await under_test.workers["d0"].next_request()
        await under_test.workers["d0"].next_abort()
        assert first.type == "response.created"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.response.id)


async def test_a_store_in_memory_is_bounded(folder: Path) -> None:
    big = "x" * 400_000
    async with openai_with(
        folder, says, response_store_caller_mib=1, max_model_len=600_000, max_message_mib=4
    ) as (_, client):
        ids = []
        for _number in range(4):
            made = await client.responses.create(model="tiny", input=big, max_output_tokens=30)
            ids.append(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[0])
        await client.responses.retrieve(ids[-1])


async def test_gateways_share_what_is_in_redis(folder: Path) -> None:
    with redis_server() as server:
        config: dict[str, Any] = {"response_store": server.url, "api_keys": API_KEYS}
        async with (
            gateway_with(folder, {}, {"d0": says}, **config) as one,
            gateway_with(folder, {}, {"d0": says}, **config) as other,
            client_of(one, ALICE) as here,
            client_of(other, ALICE) as there,
            client_of(other, BOB) as bob,
        ):
            made = await here.responses.create(model="tiny", input="Hello")
            await there.responses.create(model="tiny", input="More", previous_response_id=made.id)
            request = await other.workers["d0"].next_request()
            prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
            assert prompt.index("Hello") < prompt.index("The cache is the baton") < prompt.index("More")
            assert (await there.responses.retrieve(made.id)).to_dict() == made.to_dict()
            with pytest.raises(openai.NotFoundError):
                await bob.responses.retrieve(made.id)
            await there.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await here.responses.retrieve(made.id)


async def test_a_redis_that_is_gone_is_a_503_at_once(folder: Path) -> None:
    """The error comes before anything is computed. A request that stores nothing is served."""
    with redis_server() as server:
        async with openai_with(folder, says, response_store=server.url) as (under_test, client):
            made = await client.responses.create(model="tiny", input="Hello")
            await under_test.workers["d0"].next_request()
            server.stop()
            for call in (
                client.responses.create(model="tiny", input="Hello"),
                client.responses.create(model="tiny", input="Hello", stream=True),
                client.responses.retrieve(made.id),
                client.responses.create(model="tiny", input="x", store=False, previous_response_id=made.id),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert caught.value.status_code == 503
                assert caught.value.code == "service_unavailable"
            assert under_test.workers["d0"].received.empty()
            assert (await client.responses.create(model="tiny", input="Hello", store=False)).output_text


async def test_a_redis_that_goes_while_an_answer_runs_ends_its_stream(folder: Path) -> None:
    with redis_server() as server:
        async with openai_with(folder, begins, response_store=server.url) as (under_test, client):
            stream = await client.responses.create(model="tiny", input="Hello", stream=True)
            request = await under_test.workers["d0"].next_request()
            await anext(aiter(stream))
            server.stop()
            under_test.workers["d0"].say(request, outputs_of(request, ANSWER[3:], 3, FinishReason.STOP))
            events = [event async for event in stream]
            last = events[-1]
            assert last.type == "response.failed"
            assert last.response.error is not None
            assert last.response.error.code == "server_error"
            assert last.response.output_text == "The cache is the baton"


async def test_a_store_that_goes_before_a_response_is_cancelled_is_a_503(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnavailable("the store cannot be reached")

    async with openai_with(folder, begins) as (_, client):
        stream = await client.responses.create(model="tiny", input="Hello", stream=True)
        first = await anext(aiter(stream))
        assert first.type == "response.created"
        for name in ("keep", "response"):
            monkeypatch.setattr(MemoryStore, name, fail)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.cancel(first.response.id)
        assert caught.value.status_code == 503
        *_rest, last = [event async for event in stream]
        assert last.type == "response.failed"
        assert last.response.status == "cancelled"


@pytest.mark.parametrize("url", ["redis://", "http://127.0.0.1", "disk"])
def test_a_store_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="response_store"):
        GatewayConfig(response_store=url)


@pytest.mark.parametrize("url", ["redis://:hush@127.0.0.1:port", "redis://:hush#rest@127.0.0.1"])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.response_store: ") as caught:
        store_for(GatewayConfig(response_store=url), VirtualClock())
    assert "hush" not in str(caught.value)


NO_URL = "must be a Redis URL like redis://"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("{folder}/none", None, "cannot be read: No such file or directory$"),
        ("{folder}", None, "cannot be read: Is a directory$"),
        ("{folder}/pipe", None, NO_URL),
        ("~nosuchuser/url", None, "cannot be read: ~nosuchuser/url: there is no user"),
        ("{folder}/url", "redis://:hush\udcff@127.0.0.1", "cannot be read: 'utf-8' codec"),
        ("{folder}/url", "redis://:hush@127.0.0.1:port\n", NO_URL),
        ("{folder}/url", "redis://:hush@127.0.0.1\nredis://:hush@127.0.0.2\n", NO_URL),
        ("{folder}/url", "unix:///hush.sock", NO_URL),
        ("{folder}/url", "hush\n", NO_URL),
        ("{folder}/url", "none", NO_URL),
        ("{folder}/url", "memory", NO_URL),
        ("{folder}/url", "", NO_URL),
    ],
)
def test_a_file_without_a_url_is_refused_without_its_content(
    name: str, content: str | None, complaint: str, tmp_path: Path
) -> None:
    path = name.format(folder=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    if content is not None:
        Path(path).write_text(content, errors="surrogateescape")
    beginning = re.escape(f"gateway.response_store_file {path}: ")
    with pytest.raises(ConfigError, match=rf"^{beginning}{complaint}") as caught:
        store_for(GatewayConfig(response_store_file=path), VirtualClock())
    assert "hush" not in str(caught.value)


def test_a_url_may_be_in_a_file_but_not_in_both_places(tmp_path: Path) -> None:
    path = tmp_path / "store.url"
    path.write_text("redis://:hush@127.0.0.1:6379/0\n")
    store = store_for(GatewayConfig(response_store_file=str(path)), VirtualClock())
    assert type(store).__name__ == "RedisStore"
    with pytest.raises(ValueError, match="both name a store; remove one of the two"):
        GatewayConfig(response_store="none", response_store_file=str(path))
    with pytest.raises(ConfigError, match="for the URL itself, use response_store") as caught:
        BatonConfig.from_mapping({"gateway": {"response_store_file": "redis://:hush@127.0.0.1"}})
    assert "hush" not in str(caught.value)


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.delitem(sys.modules, "gateway.http.responses.redis_store", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'baton\[redis\]'"):
        check_access(BatonConfig.from_mapping({"gateway": {"response_store": "redis://127.0.0.1"}}))


async def test_many_turns_of_one_conversation(folder: Path) -> None:
    """Twenty turns, each of which continues the response before it by its id."""
    async with openai_with(folder, says, max_model_len=4096) as (under_test, client):
        previous = None
        for number in range(20):
            made = await client.responses.create(
                model="tiny", input=f"turn {number}", previous_response_id=previous
            )
            previous = made.id
        requests = [await under_test.workers["d0"].next_request() for _ in range(20)]
        prompt = TOKENIZER.decode(list(requests[-1].prompt_token_ids), skip_special_tokens=False)
        assert [prompt.index(f"turn {number}<") for number in range(20)] == sorted(
            prompt.index(f"turn {number}<") for number in range(20)
        )
        assert prompt.count("The cache is the baton") == 19
