"""Requests as packages for programs send them, each with the body that the package sent."""

from pathlib import Path
from typing import Any

import pytest

from tests.factories.conversations import TEMPLATES
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer, make_tokenizer_dir

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO = [{"role": "user", "content": "hi"}]

AS_GOOGLES_ADK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "be"}, *HELLO],
    "temperature": 0.1,
    "top_p": 0.9,
    "stop": ["x"],
    "max_completion_tokens": 40,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "seed": 3,
    "top_k": 4.0,
}
"""Through LiteLLM. In google-genai, `top_k` is a float."""


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        ("/v1/chat/completions", AS_GOOGLES_ADK, 40),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 5.0, "top_k": 4.0}, 5),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5.0, "top_k": 4.0}, 5),
        ("/v1/responses", {"input": HELLO, "max_output_tokens": 5.0, "top_k": 4.0}, 5),
    ],
)
async def test_an_integer_may_have_a_fraction_of_zero(
    folder: Path, path: str, body: dict[str, Any], max_tokens: int
) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post(path, json={"model": "tiny"} | body)
        assert answer.status_code == 200, answer.text
        params = (await under_test.workers["d0"].next_request()).sampling_params
        assert (params.top_k, params.max_tokens) == (4, max_tokens)
        refused = await client.post(path, json={"model": "tiny"} | body | {"top_k": 4.5})
    assert refused.status_code == 400
    assert "top_k: must be a valid integer, got 4.5" in refused.text


CALL_ID = "call_6b745f83b7b8c84a791e885e"
AS_QWEN_AGENT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": "Is it warm in Paris?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": CALL_ID,
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {
            "role": "tool",
            "content": "warm",
            "name": "weather",
            "extra": {"function_id": CALL_ID},
            "id": CALL_ID,
        },
    ],
    "seed": 523987285,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "w",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
        }
    ],
}
"""With `use_raw_api`. The result of a call has the call's id, but under another name than OpenAI's."""


async def test_a_result_with_the_calls_id_in_its_id(tmp_path: Path) -> None:
    folder = make_tokenizer_dir(tmp_path, TEMPLATES["hermes"])
    *turns, result = AS_QWEN_AGENT["messages"]
    refused = [
        (result | {"id": None}, "messages.2.tool_call_id", "required, but missing"),
        (result | {"id": "call_0"}, "messages.2.tool_call_id", "no earlier message"),
        (result | {"tool_call_id": "call_0"}, "messages.2.id", "differs from tool_call_id"),
    ]
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=2048) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post("/v1/chat/completions", json=AS_QWEN_AGENT)
        assert answer.status_code == 200, answer.text
        request = await under_test.workers["d0"].next_request()
        for changed, field, problem in refused:
            body = AS_QWEN_AGENT | {"messages": [*turns, changed]}
            error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
            assert error["param"] == field
            assert problem in error["message"]
    prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>tool\nwarm<|im_end|>\n<|im_start|>assistant\n")
