"""/tokenize and /detokenize over real HTTP."""

from pathlib import Path
from typing import Any

from gateway import Tokenizer
from tests.factories.answer_format import MarkedFormat
from tests.factories.gateway import gateway_with

MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "hé"},
]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhé<|im_end|>\n"


async def test_texts_and_conversations_become_the_models_tokens_and_back(folder: Path) -> None:
    own = Tokenizer(folder)

    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:

        async def ask(path: str, **body: Any) -> Any:
            return (await client.post(path, json=body)).json()

        answer = await ask("/tokenize", prompt="the cache é", return_token_strs=True)
        assert answer["tokens"] == list(own.encode("the cache é"))
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
        assert answer["token_strs"] == own.backend.encode("the cache é").tokens
        assert await ask("/detokenize", tokens=answer["tokens"], model="tiny") == {"prompt": "the cache é"}

        rendered = await ask("/tokenize", messages=MESSAGES)
        text = await ask("/detokenize", tokens=rendered["tokens"])
        assert text == {"prompt": RENDERED + "<|im_start|>assistant\n"}
        text = await ask("/detokenize", tokens=rendered["tokens"], skip_special_tokens=True)
        assert text["prompt"].startswith("system\nBe brief.\nuser")
        rendered = await ask("/tokenize", messages=MESSAGES, add_generation_prompt=False)
        assert await ask("/detokenize", tokens=rendered["tokens"]) == {"prompt": RENDERED}

        half = own.encode("é")[0]
        assert await ask("/detokenize", tokens=[half]) == {"prompt": "\ufffd"}


async def test_conversations_with_tools_are_rendered_as_for_a_chat(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
    ]
    async with (
        gateway_with(folder, {}, {}, answer_format=MarkedFormat(), max_model_len=1000) as under_test,
        under_test.http() as client,
    ):
        options = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
        answer = await client.post("/tokenize", json={"messages": turns, "tools": tools, **options})
        text = await client.post("/detokenize", json={"tokens": answer.json()["tokens"]})
    *_, before, last = text.json()["prompt"].split("<|im_start|>")
    assert before == "assistant\n<call f>{}</call><|im_end|>\n"
    assert last == "tool f\n7<|im_end|>\n"
    assert "system\ntools: f{" in text.json()["prompt"]


INVALID: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, 400, "chat_template_kwargs"),
    (
        "/tokenize",
        {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}},
        400,
        "chat_template_kwargs.tools",
    ),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/tokenize", {"prompt": 7}, 400, "prompt"),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content.0.type",
    ),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
    ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]


async def test_an_invalid_question_is_refused_by_its_field(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        for path, body, status, param in INVALID:
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
