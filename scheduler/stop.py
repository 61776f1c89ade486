"""Whether a new token ends its request; stop strings are text, so the gateway handles them."""

from scheduler.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> RequestStatus | None:
    """The status to which the request's last token leads, or None if the request continues.

    The checks, in this order: EOS and stop tokens, but not before `min_tokens`; `max_tokens` and
    `max_model_len`; for a producer with blocks to hand over, its first new token.
    """
    params = request.sampling_params
    num_tokens = request.num_tokens
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if request.all_token_ids[-1] in request.stop_token_ids and num_output_tokens >= params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if request.is_producer and request.block_table is not None:
        return RequestStatus.FINISHED_HANDED_OVER
    return None


def end_of_initial_output(request: Request) -> str | None:
    """Why a request's initial output already ends it by the same rules; None if the request may continue."""
    params = request.sampling_params
    outputs = request.output_token_ids
    if len(outputs) >= params.max_tokens:
        return (
            f"{len(outputs)} tokens, of which max_tokens allows {params.max_tokens}; nothing is left "
            "to sample"
        )
    for num_tokens, token_id in enumerate(outputs, start=1):
        if token_id in request.stop_token_ids and num_tokens >= params.min_tokens:
            return f"token {num_tokens - 1} is {token_id}, which ends the request"
    return None
