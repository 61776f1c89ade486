"""ContextLimits: how long a request may be and become on this engine; knows nobody's progress."""

from baton.config import SchedulerConfig
from baton.errors import ConfigError, InvalidRequest
from scheduler.block_hash import MAX_TOKEN_ID
from scheduler.request import Request


class ContextLimits:
    """What the model and the pool allow; `config.num_blocks` and `config.max_model_len` must be set.

    A request that outgrew the pool could never run again, so the pool is a limit of its own. The last token of a full
    context is never computed, so it needs no slot.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if config.num_blocks is None or config.max_model_len is None:
            raise ConfigError(
                f"scheduler: num_blocks ({config.num_blocks}) and max_model_len ({config.max_model_len}) must be set "
                "before a scheduler is made"
            )
        self._config = config
        self._num_slots = (config.num_blocks - 1) * config.block_size
        self.max_model_len = min(config.max_model_len, self._num_slots + 1)
        """Tokens of one request, prompt and output, at which it ends."""

    def check(self, request: Request) -> None:
        """InvalidRequest if `request` could never run: its prompt and a slot for the first output must fit."""
        num_tokens = request.num_prompt_tokens + 1
        if num_tokens > min(self.max_model_len, self._num_slots):
            raise InvalidRequest(
                "prompt",
                f"{request.num_prompt_tokens} tokens and one to generate do not fit into max_model_len "
                f"({self._config.max_model_len}) and {self._num_slots} slots of KV cache",
            )
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or highest > MAX_TOKEN_ID:
            raise InvalidRequest("prompt", f"token ids are 0 to {MAX_TOKEN_ID}, got {lowest} to {highest}")
