"""LoadMeter: how fast a worker computes, as moving averages over its last steps; knows no clock and no device."""

from dataclasses import dataclass

MEMORY_STEPS = 20.0
"""A step's weight falls by a factor of e after this many later steps of its kind. That is some seconds of
prefill, or half a second of decoding."""


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
            self._prefill.add(num_prompt_tokens, time_s)
        elif time_s and num_requests:
            self._decode.add(1, time_s)
        return time_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in all steps but decode steps (see `step_done`); 0 before the first such step."""
        return self._prefill.work / self._prefill.time_s if self._prefill.time_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Time of a decode step (see `step_done`); 0 before the first such step."""
        return self._decode.time_s / self._decode.work if self._decode.work else 0.0
