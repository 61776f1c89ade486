"""LoadMeter: how fast a worker computes, as moving averages over its last steps; knows no clock and no device."""

from dataclasses import dataclass

MEMORY_STEPS = 20.0
"""A step counts e times less after so many others of its kind: some seconds of prefill, half a second of decoding."""


@dataclass(slots=True)
class _Average:
    """Of a rate: recent work over recent time, so that long steps count for what they are."""

    work: float = 0.0
    time_s: float = 0.0

    def add(self, work: float, time_s: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.work = keep * self.work + work
        self.time_s = keep * self.time_s + time_s


class LoadMeter:
    """Times are the caller's, in seconds. Nothing fades while no step ends: an idle worker is as fast as it was."""

    def __init__(self) -> None:
        self._prefill = _Average()
        self._decode = _Average()
        self._last_done_at = 0.0

    def step_done(
        self, num_prompt_tokens: int, num_decodes: int, submitted_at: float, done_at: float
    ) -> float:
        """A step is computed. It began when it was submitted, or when the one before it was done, if that was later.

        `num_prompt_tokens` were those of prompts, `num_decodes` requests got one more token. Returns what it took; 0 if
        the device was ahead, so that when it was done is not known.
        """
        time_s = max(0.0, done_at - max(submitted_at, self._last_done_at))
        self._last_done_at = done_at
        if time_s and num_prompt_tokens:
            self._prefill.add(num_prompt_tokens, time_s)
        elif time_s and num_decodes:
            self._decode.add(1, time_s)
        return time_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """In steps that computed prompts, whatever else was in them; 0 before the first."""
        return self._prefill.work / self._prefill.time_s if self._prefill.time_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Of a step that only decoded; 0 before the first."""
        return self._decode.time_s / self._decode.work if self._decode.work else 0.0
