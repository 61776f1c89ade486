"""Whether a new token ends its request; stop strings are text and therefore the gateway's."""

from scheduler.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> RequestStatus | None:
    """The status that the request's last token leads to, or None if it goes on.

    In this order: nothing but a full context ends a request before `min_tokens`; then EOS and stop tokens; then
    `max_tokens` and `max_model_len`; and a producer always ends with token 0.
    """
    params = request.sampling_params
    num_tokens = request.num_tokens
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if request.all_token_ids[-1] in request.stop_token_ids and num_output_tokens >= params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if request.is_producer:
        return RequestStatus.FINISHED_HANDED_OVER
    return None
