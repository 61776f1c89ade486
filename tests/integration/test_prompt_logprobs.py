"""Log-probabilities of prompts, as clients of each frontend see them."""

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.request import EngineRequest, RequestOutput, TokenLogprobs
from baton.v1 import generation_service_pb2 as pb
from baton.v1.generation_service_pb2_grpc import GenerationServiceStub
from gateway.choices import PORTION_TOKENS
from gateway.grpc.generated import vllm_engine_pb2 as engine_pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from tests.factories.gateway import answering, gateway_with, prompt_logprobs_of
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_with

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode(" the baton").ids
HELLO = TOKENIZER.encode("Hello").ids
LONG = TOKENIZER.encode("the cache " * PORTION_TOKENS).ids
CONFIG: dict[str, Any] = {"max_model_len": len(LONG) + 100, "max_unread_tokens": len(LONG) + 100}


def scripted(request: EngineRequest) -> list[RequestOutput]:
    """The answer. The probability of each of its tokens is 1."""
    outputs = answering(ANSWER)(request)
    for output in outputs:
        if request.sampling_params.logprobs is not None:
            output.logprobs = tuple(TokenLogprobs(token_id, 0.0, 1, ()) for token_id in output.token_ids)
    return outputs


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hello", ["Hello"]),
        (LONG, ["the cache " * PORTION_TOKENS]),
        ([HELLO, [70]], ["Hello", TOKENIZER.decode([70])]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_log_probabilities_of_its_prompt(
    folder: Path, prompt: Any, texts: list[str], stream: bool
) -> None:
    async with openai_with(folder, scripted, scripted, **CONFIG) as (under_test, client):
        answer: Any = await client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=2, max_tokens=5, n=2, stream=stream
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        for number in range(2 * len(texts)):
            parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == number]
            text = "".join(part.text for part in parts)
            assert text == texts[number // 2] + " the baton"
            logprobs = [part.logprobs for part in parts]
            tokens = [token for each in logprobs for token in each.tokens]
            assert "".join(tokens) == text
            offsets = [offset for each in logprobs for offset in each.text_offset]
            assert [text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True)] == [
                True
            ] * len(tokens)
            num_prompt_logprobs = len(tokens) - 1 - len(ANSWER)
            numbers = [number for each in logprobs for number in each.token_logprobs]
            assert numbers == [None, *[-0.5] * num_prompt_logprobs, *[0.0] * len(ANSWER)]
            tops = [top for each in logprobs for top in each.top_logprobs]
            assert [top if top is None else len(top) for top in tops] == [
                *(None, *[2] * num_prompt_logprobs),
                *[1] * len(ANSWER),  # the token itself
            ]
        params = (await under_test.workers["p0"].next_request()).sampling_params
        assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (2, 2, 5)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_tokens_of_an_answer_only_the_prompt_comes(
    folder: Path, logprobs: int | None, stream: bool
) -> None:
    async with openai_with(folder, scripted) as (under_test, client):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await client.completions.create(
            model="tiny", prompt="Hello", echo=True, logprobs=logprobs, max_tokens=0, stream=stream, **options
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == "Hello"
        assert choices[-1].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 0
        if logprobs is not None:
            assert "".join(token for choice in choices for token in choice.logprobs.tokens) == "Hello"
        params = (await under_test.workers["d0"].next_request()).sampling_params
        assert (params.max_tokens, params.prompt_logprobs) == (1, logprobs)


async def test_vllms_field_has_each_token_of_a_prompt_and_the_likeliest_ones(folder: Path) -> None:
    async with openai_with(folder, scripted) as (under_test, client):
        completion: Any = await client.completions.create(
            model="tiny", prompt=HELLO, n=2, extra_body={"prompt_logprobs": 3}
        )
        token_id = HELLO[1]
        for choice in completion.choices:
            first, second, *_ = choice.prompt_logprobs
            assert first is None
            assert list(second) == [str(token_id), "65", "67"]
            assert second[str(token_id)] == {
                "logprob": -0.5,
                "rank": 2,
                "decoded_token": TOKENIZER.decode([token_id]),
            }
            assert (second["65"]["rank"], second["67"]["rank"]) == (1, 3)
            assert second["67"]["logprob"] == -9999.0
            assert len(choice.prompt_logprobs) == len(HELLO)
            assert choice.logprobs is None
        assert (await under_test.workers["d0"].next_request()).sampling_params.prompt_logprobs == 3
        chat: Any = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], extra_body={"prompt_logprobs": 0}
        )
        assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
        assert [each if each is None else len(each) for each in chat.prompt_logprobs[:2]] == [None, 1]
        plain: Any = await client.completions.create(model="tiny", prompt=HELLO)
        assert "prompt_logprobs" not in plain.choices[0].to_dict()


async def test_errors_name_the_field_with_which_the_client_asked(folder: Path) -> None:
    async with (
        openai_with(folder, scripted, max_model_len=20_000) as (under_test, _),
        under_test.http() as http,
    ):
        prompt, fields = [5] * 15_000, {"model": "tiny", "max_tokens": 1}
        for asked in ({"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}):
            body = {"prompt": prompt, **fields, **asked}
            error = (await http.post("/v1/completions", json=body, timeout=30)).json()["error"]
            name = list(asked)[-1]
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: 20 for each of 15000 prompt tokens")


async def test_a_grpc_client_gets_them_before_and_with_the_first_token(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": scripted}, **CONFIG) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = GenerationServiceStub(channel)
        for prompt, num_messages in ((HELLO, 1), (LONG, -(-(len(LONG) - 1) // PORTION_TOKENS))):
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
            request.sampling_params.prompt_logprobs = 2
            responses = [response async for response in stub.Generate(request)]
            with_logprobs = [response for response in responses if response.prompt_logprobs]
            assert with_logprobs == responses[:num_messages]
            assert [bool(response.token_ids) for response in with_logprobs] == [False] * (
                num_messages - 1
            ) + [True]
            got = [each for response in with_logprobs for each in response.prompt_logprobs]
            assert [
                (
                    each.token_id,
                    each.logprob,
                    each.rank,
                    tuple((top.token_id, top.logprob) for top in each.top),
                )
                for each in got
            ] == [
                (each.token_id, each.logprob, each.rank, each.top) for each in prompt_logprobs_of(prompt, 2)
            ]
            assert [token for response in responses for token in response.token_ids] == ANSWER


@pytest.mark.parametrize("prompt", [HELLO, LONG, [5]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_gets_them_as_input_logprobs(folder: Path, prompt: list[int], stream: bool) -> None:
    async with (
        gateway_with(folder, {}, {"d0": scripted}, **CONFIG) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = VllmEngineStub(channel)
        request = engine_pb.GenerateRequest(
            tokenized=engine_pb.TokenizedInput(input_ids=prompt),
            sampling_params=engine_pb.SamplingParams(prompt_logprobs=2, n=2),
            stream=stream,
        )
        responses = [response async for response in stub.Generate(request)]
        for index in range(2):
            answers = [response.chunk if stream else response.complete for response in responses]
            input_logprobs = [answer.input_logprobs for answer in answers if answer.index == index]
            assert [token for each in input_logprobs for token in each.token_ids] == prompt
            first, *others = (value for each in input_logprobs for value in each.token_logprobs)
            assert not first.HasField("value")
            assert [value.value for value in others] == [-0.5] * (len(prompt) - 1)
            tops = [list(top.token_ids) for each in input_logprobs for top in each.top_logprobs]
            assert tops == [[], *([65, token_id] for token_id in prompt[1:])]
        if stream:
            ends = [response.complete for response in responses if response.HasField("complete")]
            assert not any(end.HasField("input_logprobs") for end in ends), "the chunks had them"
