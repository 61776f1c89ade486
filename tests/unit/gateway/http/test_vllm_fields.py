"""Bodies with vLLM's own fields: values that change nothing are accepted, all others are refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.http.body import Body
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.tokenize import TokenizeRequest
from gateway.http.validation import first_problem

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
TEXT = {"model": "tiny", "prompt": "Hello"}
RESPONSE = {"model": "tiny", "input": "Hello"}

ALL: dict[str, Any] = {
    "ec_transfer_params": None,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "min_p": None,
    "mm_payload": "tensors",
    "priority": 0,
    "repetition_penalty": None,
    "return_mm_kwargs": None,
    "session_id": None,
    "skip_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "structured_outputs": None,
    "top_k": None,
    "vllm_xargs": None,
    "watermarking": None,
}
GENERATION: dict[str, Any] = ALL | {
    "allowed_token_ids": None,
    "bad_words": [],
    "length_penalty": 1.0,
    "logprob_token_ids": None,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "return_token_ids": None,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
}
"""The defaults of vLLM 0.32, as its request models have them."""
OLDER = {"best_of": 1, "early_stopping": False, "guided_decoding_backend": None, "logits_processors": None}
OF_CHATS = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "echo": False,
    "include_reasoning": True,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "return_prompt_text": None,
    "tool_choice": "none",
}
OF_COMPLETIONS = {"add_special_tokens": True, "echo": False, "prompt_embeds": None, "suffix": None}
OF_RESPONSES = {
    "chat_template_kwargs": None,
    "enable_response_messages": False,
    "include_reasoning": True,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "previous_input_messages": None,
    "request_id": None,
}
OF_TOKENIZING = {
    "add_generation_prompt": True,
    "chat_template": None,
    "continue_final_message": False,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
}


@pytest.mark.parametrize(
    ("kind", "body", "defaults"),
    [
        (ChatCompletionRequest, CHAT, GENERATION | OLDER | OF_CHATS),
        (CompletionRequest, TEXT, GENERATION | OLDER | OF_COMPLETIONS),
        (ResponseRequest, RESPONSE, ALL | OF_RESPONSES),
        (TokenizeRequest, {"messages": MESSAGES}, OF_TOKENIZING),
    ],
)
def test_a_body_with_all_of_vllms_defaults_is_accepted(
    kind: type[Body], body: dict[str, Any], defaults: dict[str, Any]
) -> None:
    kind.model_validate(body | defaults)


@pytest.mark.parametrize(
    ("kind", "body", "fields", "words"),
    [
        (ChatCompletionRequest, CHAT, {"length_penalty": 2.0}, "only 1.0 is supported, got 2.0"),
        (ChatCompletionRequest, CHAT, {"length_penalty": True}, "only 1.0 is supported, got true"),
        (ChatCompletionRequest, CHAT, {"use_beam_search": True}, "only false is supported, got true"),
        (ChatCompletionRequest, CHAT, {"use_beam_search": 0}, "only false is supported, got 0"),
        (ChatCompletionRequest, CHAT, {"bad_words": ["sea"]}, "only [] is supported"),
        (ChatCompletionRequest, CHAT, {"add_special_tokens": True}, "only false is supported, got true"),
        (ChatCompletionRequest, CHAT, {"echo": True}, "only false is supported, got true"),
        (
            ChatCompletionRequest,
            CHAT,
            {"truncate_prompt_tokens": 5},
            "this field is not supported; remove it",
        ),
        (CompletionRequest, TEXT, {"add_special_tokens": False}, "only true is supported, got false"),
        (CompletionRequest, TEXT, {"mm_payload": "none"}, "only 'tensors' is supported, got 'none'"),
        (ResponseRequest, RESPONSE, {"skip_special_tokens": False}, "only true is supported, got false"),
        (
            TokenizeRequest,
            {"messages": MESSAGES},
            {"continue_final_message": True},
            "only false is supported",
        ),
    ],
)
def test_a_value_that_would_change_something_is_refused(
    kind: type[Body], body: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body | fields)
    findings: list[Any] = [{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]
    field, problem = first_problem(findings, body | fields)
    assert field == next(iter(fields))
    assert problem.startswith(words)


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_the_description_has_the_only_value(kind: type[Body]) -> None:
    properties = kind.model_json_schema()["properties"]
    assert properties["use_beam_search"]["enum"] == [False, None]
    assert properties["length_penalty"]["enum"] == [1.0, None]
