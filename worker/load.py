"""LoadMeter: how fast a worker computes, as moving averages over its last steps; knows no clock and no device."""

from dataclasses import dataclass

MEMORY_STEPS = 20.0
"""A step's weight falls by a factor of e after this many later steps of its kind. That is some seconds of
prefill, or half a second of decoding."""

SMALL_STEP_TOKENS, SMALL_SHARE = 512, 4
"""A step is small if it computes fewer prompt tokens than this, and less than 1/4 of the largest step so far."""


@dataclass(slots=True)
class _Average:
    """Average of a rate: recent work over recent time, so that long steps count in proportion."""

    work: float = 0.0
    time_s: float = 0.0

    def add(self, work: float, time_s: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.work = keep * self.work + work
        self.time_s = keep * self.time_s + time_s


class LoadMeter:
    """The averages. Only steps change them: an idle worker keeps them. The caller passes all times, in seconds."""

    def __init__(self) -> None:
        self._prefill = _Average()
        self._most_prompt_tokens = 0
        """The most prompt tokens that a step has computed."""
        self._decode = _Average()
        self._last_done_at = 0.0

    def step_done(
        self, num_prompt_tokens: int, num_requests: int, submitted_at: float, done_at: float
    ) -> float:
        """Adds a computed step. It began when it was submitted, or when the previous one was done, if that was later.

        The step computed `num_prompt_tokens` tokens of prompts, and had `num_requests` requests. A step with fewer
        prompt tokens than requests counts as a decode step. Returns the step's time; 0 if it is unknown, since the
        previous step's result was taken at the same moment.
        """
        time_s = max(0.0, done_at - max(submitted_at, self._last_done_at))
        self._last_done_at = done_at
        if time_s and num_prompt_tokens >= max(1, num_requests):
            self._add_prefill(num_prompt_tokens, time_s)
        elif time_s and num_requests:
            self._decode.add(1, time_s)
        return time_s

    def _add_prefill(self, num_tokens: int, time_s: float) -> None:
        """Adds a step, unless it is small.

        Each step takes a fixed time in addition, so a small step has a low rate. A worker that gets only short prompts
        for a while would seem slow, compared with a worker that gets long ones. The router would then send it no long
        prompts any more, and its rate would stay low.
        """
        most_before, self._most_prompt_tokens = (
            self._most_prompt_tokens,
            max(self._most_prompt_tokens, num_tokens),
        )
        fewest = min(SMALL_STEP_TOKENS, self._most_prompt_tokens // SMALL_SHARE)
        if most_before < fewest:  # compared with this larger step, all earlier steps were small
            self._prefill = _Average()
        if num_tokens >= fewest:
            self._prefill.add(num_tokens, time_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in all steps but decode steps (see `step_done`) and small ones (see
        SMALL_STEP_TOKENS); 0 before the first such step."""
        return self._prefill.work / self._prefill.time_s if self._prefill.time_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Time of a decode step (see `step_done`); 0 before the first such step."""
        return self._decode.time_s / self._decode.work if self._decode.work else 0.0
