"""The Python client of examples/: which calls it retries; and no token comes twice, whatever breaks."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.config import Tls
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1.sampling_pb2 import SamplingParams
from examples.baton_client import TLS, BatonClient, BatonError, Part, Retry, Sampling
from tests.factories.api_keys import ADMIN, ALICE, API_KEYS
from tests.factories.certificates import CertificateFiles
from tests.factories.gateway import answering, gateway_with

Context = grpc.aio.ServicerContext[Any, Any]

QUICK = Retry(attempts=4, first_wait_s=0.01)
NOWHERE = "127.0.0.1:9"


class Gateway(pb_grpc.GenerationServiceServicer):
    """Each call gets the next item of `script`: responses, perhaps with a status other than OK at the end."""

    def __init__(self, *script: "Sequence[pb.GenerateResponse | Ending]") -> None:
        self.script = list(script)
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.times_left: list[float | None] = []
        self.asked_at: list[float] = []
        self.aborted: list[str] = []

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.asked_at.append(time.monotonic())
        self.times_left.append(context.time_remaining())
        for step in self.script.pop(0):
            if isinstance(step, pb.GenerateResponse):
                yield step
            else:
                assert isinstance(step, Ending)
                await context.abort(step.code, step.message, step.trailers)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        self.aborted += request.request_ids
        return pb.AbortResponse(num_aborted=len(request.request_ids))

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="tiny", max_model_len=7, eos_token_ids=[2])


class Ending:
    def __init__(self, code: grpc.StatusCode, message: str = "", **trailers: str) -> None:
        self.code, self.message = code, message
        self.trailers = tuple((name.replace("_", "-"), value) for name, value in trailers.items())


DIED = Ending(grpc.StatusCode.UNAVAILABLE, "it died")


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


def tokens(*token_ids: int, text: str = "", is_last: bool = False) -> pb.GenerateResponse:
    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=len(token_ids)))
    return pb.GenerateResponse(token_ids=token_ids, text=text, finish=finish if is_last else None)


WHOLE = (tokens(1, 2, text="a"), tokens(3, text="bc"), tokens(4, text="d", is_last=True))


async def parts_of(client: BatonClient, **options: Any) -> list[Part]:
    return [part async for part in client.generate(text="hello", **options)]


async def ask(
    *gateways: Gateway, before: Sequence[str] = (), retry: Retry = QUICK, **options: Any
) -> tuple[list[int], str]:
    """Sends a request to unreachable targets, then to these gateways. Returns the answer's tokens and text."""
    async with (
        asyncio.timeout(60),
        _all_serving(gateways) as targets,
        BatonClient(*before, *targets, retry=retry, rng=random.Random(0)) as client,
    ):
        parts = await parts_of(client, **options)
    assert [part.finish is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    return [token for part in parts for token in part.token_ids], "".join(part.text for part in parts)


@asynccontextmanager
async def _all_serving(gateways: Sequence[Gateway]) -> AsyncIterator[list[str]]:
    if not gateways:
        yield []
        return
    async with serving(gateways[0]) as target, _all_serving(gateways[1:]) as others:
        yield [target, *others]


def test_it_passes_on_every_sampling_parameter_but_log_probabilities() -> None:
    """The client's parts of an answer have no place for log-probabilities."""
    fields = {field.name for field in SamplingParams.DESCRIPTOR.fields}
    assert {*Sampling.__annotations__} == fields - {"logprobs", "prompt_logprobs"}


async def test_lost_workers_are_skipped() -> None:
    assert await ask(Gateway(WHOLE), before=[NOWHERE]) == ([1, 2, 3, 4], "abcd")


async def test_a_call_that_a_stopping_gateway_did_not_begin_goes_to_the_next() -> None:
    """gRPC ends such calls with CANCELLED."""
    not_begun = [Ending(grpc.StatusCode.CANCELLED, "CANCELLED")]
    assert await ask(Gateway(not_begun), Gateway(WHOLE)) == ([1, 2, 3, 4], "abcd")


async def test_no_room_is_waited_out_as_long_as_the_gateway_says() -> None:
    full = [Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", retry_after_ms="300")]
    gateway = Gateway(full, WHOLE)
    assert await ask(gateway) == ([1, 2, 3, 4], "abcd")
    refused_at, answered_at = gateway.asked_at
    assert answered_at - refused_at >= 0.3


@pytest.mark.parametrize(
    "broken", [(), WHOLE[:1], WHOLE[:2], (tokens(1),), (tokens(1, 2, 3), tokens(4, text="ab"))]
)
async def test_what_breaks_goes_on_elsewhere_and_nothing_comes_twice(
    broken: Sequence[pb.GenerateResponse],
) -> None:
    first, second = Gateway([*broken, DIED]), Gateway([tokens(1, 2, 3, text="a"), DIED], WHOLE)
    third = Gateway(WHOLE)
    assert await ask(first, second, third) == ([1, 2, 3, 4], "abcd")
    # Each time the same request with the same seed: otherwise, the answers would differ.
    requests = [*first.requests, *second.requests, *third.requests]
    assert len(requests) == 3
    assert all(request == requests[0] for request in requests)
    assert requests[0].sampling_params.HasField("seed")


async def test_events_that_came_before_a_break_do_not_come_again() -> None:
    """This holds although the other gateway divides the text in other places."""
    begins, ends = (
        pb.AnswerEvent(call_begins=pb.CallBegins(name="f")),
        pb.AnswerEvent(call_ends=pb.CallEnds()),
    )

    def arguments(json: str) -> pb.AnswerEvent:
        return pb.AnswerEvent(arguments_delta=pb.ArgumentsDelta(json=json))

    def with_events(response: pb.GenerateResponse, *events: pb.AnswerEvent) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            token_ids=response.token_ids, text=response.text, finish=response.finish, events=events
        )

    first: list[pb.GenerateResponse | Ending] = [
        with_events(tokens(1), pb.AnswerEvent(text="ab"), begins),
        with_events(tokens(2), arguments('{"x')),
        DIED,
    ]
    second = [
        with_events(
            tokens(1, 2), pb.AnswerEvent(text="a"), pb.AnswerEvent(text="b"), begins, arguments('{"')
        ),
        with_events(tokens(3, is_last=True), arguments('x": 1}'), ends),
    ]

    async with (
        _all_serving([Gateway(first), Gateway(second)]) as targets,
        BatonClient(*targets, retry=QUICK, rng=random.Random(0)) as client,
    ):
        chat = pb.Chat(messages=[pb.Chat.Message(role="user", content="hi")], events=True)
        events = [event async for part in client.generate(chat=chat) for event in part.events]
    assert events == [pb.AnswerEvent(text="ab"), begins, arguments('{"x'), arguments('": 1}'), ends]


async def test_what_was_left_behind_under_a_name_is_ended_before_it_is_used_again() -> None:
    named, nameless = Gateway([WHOLE[0], DIED], WHOLE), Gateway([WHOLE[0], DIED], WHOLE)
    assert await ask(named, request_id="mine") == await ask(nameless) == ([1, 2, 3, 4], "abcd")
    assert (named.aborted, nameless.aborted) == (["mine"], [])
    whole = Gateway(WHOLE)
    await ask(whole, request_id="mine")
    assert whole.aborted == [], "it is the first one"


async def test_an_answer_that_goes_on_otherwise_is_an_error_and_not_a_mixture() -> None:
    for other in (
        [tokens(1, 7, is_last=True)],
        [tokens(1, is_last=True)],
        [tokens(1, 2, text="x"), *WHOLE[1:]],
    ):
        with pytest.raises(BatonError, match="DATA_LOSS"):
            await ask(Gateway([WHOLE[0], DIED]), Gateway(other))


async def test_a_stream_that_ends_without_an_end_is_broken() -> None:
    assert await ask(Gateway(WHOLE[:1], WHOLE)) == ([1, 2, 3, 4], "abcd")


async def test_a_client_that_does_not_resume_learns_the_failure() -> None:
    gateway = Gateway([WHOLE[0], DIED], WHOLE)
    with pytest.raises(BatonError, match="UNAVAILABLE: it died"):
        await ask(gateway, retry=Retry(may_resume=False))
    assert await ask(Gateway([DIED], WHOLE), retry=Retry(may_resume=False, first_wait_s=0.01)) == (
        [1, 2, 3, 4],
        "abcd",
    )


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "UNAUTHENTICATED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"]
)
async def test_what_does_not_pass_is_not_tried_again(code: str) -> None:
    gateway = Gateway([Ending(grpc.StatusCode[code], "no")])
    with pytest.raises(BatonError, match=f"{code}: no"):
        await ask(gateway)


async def test_it_gives_up() -> None:
    gateway = Gateway(*[[DIED]] * 9)
    with pytest.raises(BatonError, match="it died"):
        await ask(gateway)
    assert len(gateway.requests) == QUICK.attempts


async def test_a_deadline_is_for_all_attempts_together() -> None:
    full = [Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", retry_after_ms="2000")]
    gateway = Gateway(full, full, full)
    with pytest.raises(BatonError, match="no room"):
        await ask(gateway, timeout_s=3.0)
    first, second = [time_left or 0.0 for time_left in gateway.times_left]
    assert 1.0 < first <= 3.1
    assert 0.0 < second <= 1.1


def test_waits_double_part_company_and_obey_a_longer_hint() -> None:
    retry, rng = Retry(first_wait_s=0.1, longest_wait_s=1.0), random.Random(0)
    waits = [retry.wait_s(failed, None, rng) for failed in range(1, 8)]
    for failed, wait_s in enumerate(waits):
        longest_s = min(1.0, 0.1 * 2**failed)
        assert longest_s / 2 <= wait_s <= longest_s
    assert retry.wait_s(1, 7.0, rng) == 7.0


async def test_key_options_and_the_rest_of_the_api() -> None:
    first, second = Gateway(WHOLE), Gateway()
    async with (
        serving(first) as one,
        serving(second) as other,
        BatonClient(one, other, api_key="secret") as client,
    ):
        await parts_of(client, request_id="mine", max_tokens=4, temperature=0.0, seed=3, stop=["x"])
        assert first.metadata[0]["authorization"] == "Bearer secret"
        params = first.requests[0].sampling_params
        assert (params.max_tokens, params.temperature, params.seed, *params.stop) == (4, 0.0, 3, "x")
        assert await client.abort("mine")
        assert first.aborted == second.aborted == ["mine"]
        info = await client.model_info()
        assert (info.name, info.max_model_len, info.eos_token_ids) == ("tiny", 7, (2,))
        with pytest.raises(ValueError, match="exactly one"):
            await anext(client.generate(text="a", token_ids=[1]))


async def test_requests_take_turns() -> None:
    gateways = Gateway(WHOLE, WHOLE), Gateway(WHOLE, WHOLE)
    async with _all_serving(gateways) as targets, BatonClient(*targets) as client:
        for _ in range(4):
            await parts_of(client)
    assert [len(gateway.requests) for gateway in gateways] == [2, 2]


async def test_a_real_gateway_answers_and_notices_clients_that_leave(folder: Path) -> None:
    async with (
        gateway_with(folder, {"p0": answering([5, 6, 7])}, {"d0": answering([5, 6, 7])}) as tested,
        BatonClient(f"127.0.0.1:{tested.gateway.grpc_port}") as client,
    ):
        parts = await parts_of(client, max_tokens=3)
        assert [token for part in parts for token in part.token_ids] == [5, 6, 7]
        assert parts[-1].finish is not None
        assert (parts[-1].finish.reason, parts[-1].finish.decode_worker) == ("length", "d0")


async def test_a_gateway_on_this_machine_is_called_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert (await ask(Gateway(WHOLE)))[1] == "abcd"


@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_leaving_ends_the_request_on_the_workers(folder: Path, leave: str) -> None:
    def one_token(request: Any) -> Any:
        return answering([5, 6, 7])(request)[:1]

    async with (
        gateway_with(folder, {}, {"d0": one_token}) as tested,
        BatonClient(f"127.0.0.1:{tested.gateway.grpc_port}") as client,
    ):
        stream = client.generate(text="hello", max_tokens=3, mode="local")
        async with aclosing(stream):
            assert (await anext(stream)).token_ids == (5,)
            request = await tested.workers["d0"].next_request()
            if leave == "cancel":
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        assert await tested.workers["d0"].next_abort() == request.request_id


async def test_keys_and_certificates_of_a_locked_gateway(folder: Path, files: CertificateFiles) -> None:
    script = answering([5, 6, 7])
    trusted = TLS(authorities=files.ca.read_bytes())
    own = (files.folder / "alice.tls.pem").read_bytes(), (files.folder / "alice.tls.key").read_bytes()
    locked = {
        "tls": Tls(**files.tls(asks_clients=True)),
        "api_keys": API_KEYS,
        "credentials": files.credentials(ADMIN, has_own=True),
    }
    async with gateway_with(folder, {"p0": script}, {"d0": script}, **locked) as tested:  # type: ignore[arg-type]
        target = f"localhost:{tested.gateway.grpc_port}"
        for key, tls, code in (
            (ALICE, TLS(trusted.authorities, *own), None),
            (None, TLS(trusted.authorities, *own), "UNAUTHENTICATED"),
            (ALICE, trusted, "UNAVAILABLE"),
            (ALICE, None, "UNAVAILABLE"),
        ):
            async with BatonClient(target, api_key=key, tls=tls, retry=Retry(attempts=1)) as client:
                if code is None:
                    assert (await parts_of(client, max_tokens=3))[-1].finish is not None
                    assert not await client.abort("nobody's")
                    continue
                with pytest.raises(BatonError, match=code):
                    await parts_of(client)
