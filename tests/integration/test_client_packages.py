"""Requests as packages for programs send them, each with the body that the package sent."""

from pathlib import Path
from typing import Any

import pytest

from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("The cache is the baton").ids
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
