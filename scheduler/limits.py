"""ContextLimits: how long a request may be and become on this engine; knows nobody's progress."""

from baton.block_hash import MAX_TOKEN_ID
from baton.config import SchedulerConfig
from baton.errors import ConfigError, InvalidRequest
from scheduler.request import Request


class ContextLimits:
    """What the model, the pool and the budget allow; `config.num_blocks` and `config.max_model_len` must be set.

    A request that outgrew the pool could never run again, so the pool is a limit of its own; and so is the budget of a
    step where prompts are not split. The last token of a full context is never computed: it needs no slot, no budget.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if config.num_blocks is None or config.max_model_len is None:
            raise ConfigError(
                f"scheduler: num_blocks ({config.num_blocks}) and max_model_len ({config.max_model_len}) must be set "
                "before a scheduler is made"
            )
        num_slots = (config.num_blocks - 1) * config.block_size
        splits_prompts = config.batching == "unified" and config.enable_chunked_prefill
        most_computed = num_slots if splits_prompts else min(num_slots, config.max_num_batched_tokens)
        self._max_prompt_len = min(config.max_model_len - 1, num_slots - 1, most_computed)
        self._allowed = f"max_model_len ({config.max_model_len}) and {num_slots} slots of KV cache"
        if not splits_prompts:
            self._allowed += f" and one step's budget of {config.max_num_batched_tokens}"
        self.max_model_len = min(config.max_model_len, most_computed + 1)
        """Tokens of one request, prompt and output, at which it ends."""

    def apply(self, request: Request) -> None:
        """Caps the request's length. InvalidRequest if it could never run; a slot for the first output must fit."""
        if request.num_prompt_tokens > self._max_prompt_len:
            raise InvalidRequest(
                "prompt",
                f"{request.num_prompt_tokens} tokens and one to generate do not fit into {self._allowed}",
            )
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or highest > MAX_TOKEN_ID:
            raise InvalidRequest("prompt", f"token ids are 0 to {MAX_TOKEN_ID}, got {lowest} to {highest}")
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
