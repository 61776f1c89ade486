"""The section `scheduler`: what one step may hold, and which request goes first."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.config.section import Section


class SchedulerConfig(Section):
    """What one step may hold, and who goes first. Units are tokens, requests or blocks."""

    max_num_seqs: int = Field(64, ge=1)
    """Requests that may run at once. On a GPU, unless set: 256."""
    max_num_batched_tokens: int = Field(512, ge=1)
    """Tokens one step may compute. A prompt is handed over in pieces of this size, while the next is computed. On a
    GPU, unless set: up to 8192, as few as keep it busy."""
    max_model_len: int | None = Field(None, ge=1)
    """Prompt and output tokens of one request; None takes the model's own limit."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """At most this many tokens of one request a step; 0 means no cap."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    """`priority`: lower values first, ties by arrival; the worst running request is the first to give way."""
    priority_ageing_s: float = Field(0.0, ge=0.0)
    """With `priority`: waiting this long counts as much as one step of priority, so that nobody starves; 0: never."""
    async_scheduling: bool = True
    """Plan the next step while the device computes this one. Tokens are the same either way."""
    batching: Literal["unified", "prefill_first"] = "unified"
    """`prefill_first`: a step holds whole prompts only or decodes only, and prompts go first (the classical two-phase
    scheduler). It never splits a prompt, so one request is limited to `max_num_batched_tokens`."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """What becomes of a victim's KV when blocks run out: computed anew, or copied to host memory and back, while that
    has room."""
    num_swap_blocks: int | None = Field(None, ge=1)
    """Blocks in host memory for `swap`; None: as many as `engine.swap_space_mib` holds."""
    block_size: int = Field(16, ge=1)
    """Tokens in one KV block. On a GPU, unless set: 64."""
    num_blocks: int | None = Field(None, ge=2)
    """Blocks of the pool, the null block included; None: as many as the engine has memory for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        length = self.max_model_len
        if not self.enable_chunked_prefill and length is not None and self.max_num_batched_tokens < length:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({length}) when enable_chunked_prefill is false, or long prompts could never run"
            )
        if self.batching == "prefill_first" and self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) splits prompts, which batching "
                "'prefill_first' never does; leave it 0"
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
