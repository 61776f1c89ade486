"""StepCounts: the number, sizes and times of an engine's steps; plain numbers."""

from baton.system.histogram import Histogram

STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's bounds."""


class StepCounts:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.tokens = Histogram(STEP_TOKENS)
        self.prefill_s = Histogram(STEP_S)
        """Steps that computed prompts, among other things."""
        self.decode_s = Histogram(STEP_S)
        """Steps that only decoded."""
        self.num_prompt_tokens = 0
        self.num_decode_tokens = 0

    def done(self, num_prompt_tokens: int, num_decode_tokens: int, time_s: float) -> None:
        self.tokens.add(num_prompt_tokens + num_decode_tokens)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_decode_tokens += num_decode_tokens
        (self.prefill_s if num_prompt_tokens else self.decode_s).add(time_s)
