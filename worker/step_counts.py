"""StepCounts: number, sizes and times of an engine's steps. PromptTokens: the number of prompt tokens in each step."""

from baton.step import SchedulerOutput
from baton.system.histogram import Histogram

STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram's buckets, as in vLLM."""


class StepCounts:
    """Counts of an engine's steps. The engine's thread writes them, any thread reads them."""

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
    """Distinguishes prompts from other work: decodes, drafts, and runs of forced tokens.

    The tokens with which a request arrives count as its prompt. So do the tokens that a resumed request
    computes again, but not if it lacks only its last token.
    """

    def __init__(self) -> None:
        self._uncomputed: dict[str, int] = {}
        """By request: tokens of its prompt that no step has computed."""

    def count(self, plan: SchedulerOutput) -> int:
        """The number of prompt tokens in the step. Call it for every step, in order."""
        if self._uncomputed:
            for request_id in plan.preempted_req_ids | plan.finished_req_ids:
                self._uncomputed.pop(request_id, None)
        if plan.scheduled_new_reqs or plan.scheduled_cached_reqs.resumed_num_tokens:
            self._begin(plan)
        return sum(self._count_one(request_id, plan) for request_id in tuple(self._uncomputed))

    def _begin(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            if not new.is_loaded:
                num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
                self._uncomputed[new.request_id] = num_known - new.num_computed_tokens
        num_computed = plan.num_computed_tokens()
        for request_id, num_known in plan.scheduled_cached_reqs.resumed_num_tokens.items():
            if (
                num_uncomputed := num_known - num_computed[request_id]
            ) > 1:  # else it goes on with its last token
                self._uncomputed[request_id] = num_uncomputed

    def _count_one(self, request_id: str, plan: SchedulerOutput) -> int:
        """The request's prompt tokens in this step."""
        num_tokens = plan.num_scheduled_tokens.get(request_id, 0)
        self._uncomputed[request_id] -= num_tokens
        if self._uncomputed[request_id] <= 0:
            del self._uncomputed[request_id]
        return num_tokens
