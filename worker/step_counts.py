"""StepCounts: number, sizes and times of an engine's steps. PromptTokens: their number of prompt tokens."""

from baton.step import SchedulerOutput
from baton.system.histogram import Histogram

STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram's buckets, as in vLLM."""


class StepCounts:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.tokens = Histogram(STEP_TOKENS)
        self.prefill_s = Histogram(STEP_S)
        """Times of steps that computed prompts, perhaps with other tokens."""
        self.decode_s = Histogram(STEP_S)
        """Times of steps that only decoded."""
        self.num_prompt_tokens = 0
        self.num_decode_tokens = 0

    def done(self, num_prompt_tokens: int, num_decode_tokens: int, time_s: float) -> None:
        self.tokens.add(num_prompt_tokens + num_decode_tokens)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_decode_tokens += num_decode_tokens
        (self.prefill_s if num_prompt_tokens else self.decode_s).add(time_s)


class PromptTokens:
    """Distinguishes parts of prompts from other multi-token work: drafts, and runs of forced tokens."""

    def __init__(self) -> None:
        self._forced: dict[str, int] = {}
        """By request: uncomputed tokens of a forced run, including the sampled token before them."""

    def count(self, plan: SchedulerOutput) -> int:
        """The number of prompt tokens in the step. Call it for every step, in order."""
        counts, drafts, forced = plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens, self._forced
        forced |= {name: 1 + len(token_ids) for name, token_ids in plan.forced_token_ids.items()}
        for name in plan.preempted_req_ids | plan.finished_req_ids if forced else ():
            forced.pop(name, None)  # if resumed, it computes all again, like a prompt
        is_decoding = plan.total_num_scheduled_tokens - sum(map(len, drafts.values())) == len(counts)
        if is_decoding and not forced:
            return 0
        num_prompt_tokens = 0
        for name, num_tokens in counts.items():
            if name in forced:
                forced[name] -= num_tokens
                if forced[name] <= 0:
                    del forced[name]
            elif num_tokens > 1 and name not in drafts:
                num_prompt_tokens += num_tokens
        return num_prompt_tokens
