"""The section `scheduler`: what one step may hold, and which request goes first."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.config.section import Section
from baton.kv import MAX_BLOCK_SIZE


class SchedulerConfig(Section):
    """What one step may hold, and which request goes first. Units are tokens, requests or blocks."""

    max_num_seqs: int = Field(64, ge=1)
    """Requests that may run at once; with `batching: prefill_first`, requests that one step may hold. Default on a
    GPU: 256."""
    max_num_batched_tokens: int = Field(128, ge=1)
    """Tokens that one step may compute. A prompt is handed over in parts of this size while the next part is
    computed, and a prompt that arrives meanwhile waits for the current part. If unset: at least `max_num_seqs`; where
    prompts are not split, also at least 512 and `max_model_len`; with `batching: mixed` on a CPU, as many as the KV
    pool holds. Default of prefill workers on a CPU with AMX, for weights in bfloat16: 512. Default on a GPU: the fewest
    that keep the GPU busy, at most 8192. `cluster.prefill_max_num_batched_tokens` and
    `cluster.decode_max_num_batched_tokens` override it."""
    max_model_len: int | None = Field(None, ge=1)
    """Prompt and output tokens of one request. If unset: the model's own limit."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """Most tokens of one request in one step; 0 means no limit."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit into one step. If false, only `long_prefill_token_threshold` splits prompts, as
    in vLLM."""
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    """`priority`: lower values go first, and equal ones in the order of arrival. The running request with the worst
    priority is preempted first."""
    priority_ageing_s: float = Field(0.0, ge=0.0)
    """With `priority`: waiting this long on a worker improves a request's priority by one, so that no request starves
    there; 0: never. In a gateway's queue, priorities do not age."""
    async_scheduling: bool = True
    """Plan the next step while the device computes the current one, except where drafts or forced tokens decide what
    comes next. Tokens are the same either way."""
    batching: Literal["unified", "prefill_first", "mixed"] = "unified"
    """`prefill_first`: a step holds either whole prompts or decodes, and prompts go first (the classical two-phase
    scheduler). More requests may run than one step holds; a decode step then takes those that started first. `mixed`:
    whole prompts go first, and all decodes are in the same step. Neither of these two splits a prompt, so a request is
    limited to `max_num_batched_tokens`."""
    prefill_first_rules: Literal["nano_vllm", "mini_vllm"] = "nano_vllm"
    """Variants of `prefill_first`. `nano_vllm`: a prompt uses as much of the step's budget as it has tokens to compute.
    `mini_vllm`: a prompt uses its whole length, cached or not; and the first request that has no place in a decode step
    gets room for its next token, even if another request is preempted for that."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """How a preempted request's KV is restored: computed again or, while host memory has room, copied there and
    back."""
    num_swap_blocks: int | None = Field(None, ge=1)
    """Blocks in host memory for `swap`. If unset: as many as `engine.swap_space_mib` holds."""
    block_size: int = Field(16, ge=1, le=MAX_BLOCK_SIZE)
    """Tokens in one KV block. Default on a GPU: 64."""
    num_blocks: int | None = Field(None, ge=2)
    """Blocks of the pool, the null block included. If unset: as many as fit into the engine's memory."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        length = self.max_model_len
        is_set = "max_num_batched_tokens" in self.model_fields_set  # else the worker chooses enough
        if (
            not self.enable_chunked_prefill
            and length is not None
            and is_set
            and self.max_num_batched_tokens < length
        ):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({length}) when enable_chunked_prefill is false; otherwise long prompts could never run"
            )
        if self.batching != "unified" and self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) splits prompts, "
                f"which batching '{self.batching}' never does; set it to 0"
            )
        if self.batching != "prefill_first" and self.prefill_first_rules != "nano_vllm":
            raise ValueError(
                f"prefill_first_rules ('{self.prefill_first_rules}') needs batching 'prefill_first', "
                f"not '{self.batching}'"
            )
        if self.policy != "priority" and self.priority_ageing_s:
            raise ValueError(
                f"priority_ageing_s ({self.priority_ageing_s}) needs policy 'priority', not '{self.policy}'"
            )
        if self.preemption == "recompute" and self.num_swap_blocks:
            raise ValueError(
                f"num_swap_blocks ({self.num_swap_blocks}) needs preemption 'swap', not 'recompute'"
            )
        return self

    @property
    def splits_prompts(self) -> bool:
        """Whether a prompt that does not fit into one step is computed in several steps."""
        return self.batching == "unified" and self.enable_chunked_prefill
