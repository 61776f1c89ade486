"""Fields of vLLM's APIs that Baton does not have. A request may have them with the values that change nothing.

Scripts that copy vLLM's example bodies have these fields, and so have programs that send all defaults of a request. The
fields and their defaults are those of vLLM 0.32, and some of older versions.
"""

from typing import Annotated

from gateway.http.body import Body, NotSupported, Only


class VLLMFields(Body):
    """The fields that chats, completions and responses have in common."""

    ec_transfer_params: NotSupported = None
    include_stop_str_in_output: Annotated[None, Only(False)] = None
    kv_transfer_params: NotSupported = None
    media_io_kwargs: NotSupported = None
    mm_payload: Annotated[None, Only("tensors")] = None
    mm_processor_kwargs: NotSupported = None
    repetition_detection: NotSupported = None
    return_mm_kwargs: NotSupported = None
    session_id: NotSupported = None
    vllm_xargs: NotSupported = None
    watermarking: Annotated[None, Only(False)] = None


class VLLMGenerationFields(VLLMFields):
    """The fields that chats and completions have in common."""

    allowed_token_ids: NotSupported = None
    bad_words: Annotated[None, Only([])] = None
    early_stopping: Annotated[None, Only(False)] = None
    guided_decoding_backend: NotSupported = None
    guided_whitespace_pattern: NotSupported = None
    length_penalty: Annotated[None, Only(1.0)] = None
    logits_processors: NotSupported = None
    logprob_token_ids: NotSupported = None
    return_token_ids: Annotated[None, Only(False)] = None
    return_token_offsets: Annotated[None, Only(False)] = None
    return_tokens_as_token_ids: Annotated[None, Only(False)] = None
    routed_experts_prompt_start: Annotated[None, Only(0)] = None
    spaces_between_special_tokens: Annotated[None, Only(True)] = None
    stream_interval: Annotated[None, Only(1)] = None
    truncate_prompt_tokens: NotSupported = None
    truncation_side: NotSupported = None
    use_beam_search: Annotated[None, Only(False)] = None
