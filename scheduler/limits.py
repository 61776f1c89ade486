"""How long a request may be, or may grow, on this engine, and whether a new token ends it.

Stop strings are text, so the gateway handles them.
"""

from baton.config import SchedulerConfig
from baton.errors import InvalidRequest
from baton.kv_groups import KVGroups
from scheduler.request import Request, RequestStatus


class ContextLimits:
    """The limits that model, pool and budget impose; `config.num_blocks` and `config.max_model_len` must be set.

    A request that outgrew the pool could never run again, so the pool's size is a limit, too. If prompts are
    not split, the budget of a step is another limit. The last token of a full context is never computed, so
    it needs no slot and no budget.
    """

    def __init__(self, config: SchedulerConfig, groups: KVGroups) -> None:
        assert config.num_blocks is not None, "a worker first chooses the number of blocks"
        assert config.max_model_len is not None, "a worker first chooses the limit of its model"
        size, num_usable = config.block_size, config.num_blocks - 1
        num_rows = groups.most_rows(num_usable, size, config.max_num_batched_tokens)
        num_slots = config.max_model_len if num_rows is None else num_rows * size
        most_computed = num_slots if config.splits_prompts else min(num_slots, config.max_num_batched_tokens)
        self._max_initial_len = min(config.max_model_len - 1, num_slots - 1, most_computed)
        self._allowed = f"max_model_len ({config.max_model_len}) and {num_slots} slots of KV cache"
        if not config.splits_prompts:
            self._allowed += f" and one step's budget of {config.max_num_batched_tokens}"
        self.max_model_len = min(config.max_model_len, most_computed + 1)
        """The number of prompt and output tokens at which a request ends."""

    def apply(self, request: Request) -> None:
        """Caps the request's length. Raises InvalidRequest if the request and one new token could never fit.

        A request is invalid, too, if its initial output already ends it: the sender received the end together
        with these tokens.
        """
        if reason := _why_initial_output_ends(request):
            raise InvalidRequest("output_token_ids", reason)
        if request.num_initial_tokens > self._max_initial_len:
            num_outputs = request.num_output_tokens
            so_far = f", {num_outputs} of output" if num_outputs else ""
            raise InvalidRequest(
                "prompt",
                f"{request.num_prompt_tokens} tokens{so_far} and one token to generate do not fit into {self._allowed}",
            )
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)


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


def _why_initial_output_ends(request: Request) -> str | None:
    """Why a request's initial output already ends it by the rules of `check_stop`; None if it may continue."""
    params = request.sampling_params
    outputs = request.output_token_ids
    if len(outputs) >= params.max_tokens:
        return f"{len(outputs)} output tokens, but max_tokens allows {params.max_tokens}; nothing is left to sample"
    for num_tokens, token_id in enumerate(outputs, start=1):
        if token_id in request.stop_token_ids and num_tokens >= params.min_tokens:
            return f"token {num_tokens - 1} is {token_id}, which ends the request"
    return None
