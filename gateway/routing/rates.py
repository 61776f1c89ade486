"""Rates learned from workers and finished requests: averages that forget old values."""

from dataclasses import dataclass, field

WEIGHT = 0.2
"""Weight of the newest value. After ten more values, a value has a tenth of its first weight."""

PREFILL_TOKENS_PER_S = 5_000.0
DECODE_STEP_S = 0.02
TRANSFER_BYTES_PER_S = 5e9
BYTES_PER_TOKEN = 100_000.0
"""The values from PREFILL_TOKENS_PER_S to BYTES_PER_TOKEN apply until measurements exist. They fit a mid-sized model on
a mid-sized GPU and network."""

SHARE_OF_REQUEST = 0.02
"""Until steps of different sizes were measured, each request is assumed to add this share of the time of a step
without requests. Afterwards, each request adds at least a tenth of it, so that a request always has a cost."""

MIN_SPREAD = 0.5
"""With a smaller variance of the number of requests per step, no slope is fitted, since it would be noise."""


@dataclass(slots=True)
class MovingAverage:
    """Average of the values added so far; newer values count more. None before the first value."""

    value: float | None = None

    def add(self, value: float) -> float:
        """Adds a value and returns the average."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)
        return self.value


@dataclass(slots=True)
class StepTime:
    """Time of a decode step as a linear function of its number of requests, fitted to recent steps."""

    start_s: float = DECODE_STEP_S
    """Time of a step without requests."""
    per_request_s: float = SHARE_OF_REQUEST * DECODE_STEP_S
    """Time that each request adds."""
    is_measured: bool = False
    _requests: MovingAverage = field(default_factory=MovingAverage)
    _seconds: MovingAverage = field(default_factory=MovingAverage)
    _squares: MovingAverage = field(default_factory=MovingAverage)
    _products: MovingAverage = field(default_factory=MovingAverage)

    def add(self, num_requests: int, seconds: float) -> None:
        x, y = self._requests.add(num_requests), self._seconds.add(seconds)
        xx, xy = self._squares.add(num_requests * num_requests), self._products.add(num_requests * seconds)
        spread = xx - x * x
        guess = SHARE_OF_REQUEST * y / (1.0 + SHARE_OF_REQUEST * x)
        slope = (xy - x * y) / spread if spread > MIN_SPREAD else guess
        self.per_request_s = min(max(slope, 0.1 * guess), y / max(x, 1.0))
        self.start_s = y - self.per_request_s * x
        self.is_measured = True


@dataclass(slots=True)
class LinkRates:
    """Bytes per second from each prefill worker to each decode worker, and bytes per token."""

    typical: MovingAverage = field(default_factory=MovingAverage)
    bytes_per_token: MovingAverage = field(default_factory=MovingAverage)
    _by_pair: dict[tuple[str, str], MovingAverage] = field(default_factory=dict)

    def measured(self, prefill: str, decode: str, num_tokens: int, num_bytes: int, moving_s: float) -> None:
        """Learns from a hand-over of `num_tokens` tokens.

        Blocks are sent as they are computed, so the measured rate of a long prompt is at most the rate of its
        computation. This does no harm: such requests wait for the computation, not for the transfer.
        """
        if num_tokens > 0:
            self.bytes_per_token.add(num_bytes / num_tokens)
        if moving_s > 0.0:
            rate = num_bytes / moving_s
            self.typical.add(rate)
            self._by_pair.setdefault((prefill, decode), MovingAverage()).add(rate)

    def seconds_per_token(self, prefill: str, decode: str) -> float:
        """Transfer time per token on this link; of a typical link if this link had no hand-over yet."""
        average = self._by_pair.get((prefill, decode))
        return self._per_token(average.value if average is not None else self.typical.value)

    def typical_seconds_per_token(self) -> float:
        return self._per_token(self.typical.value)

    def forget(self, worker: str) -> None:
        self._by_pair = {pair: rate for pair, rate in self._by_pair.items() if worker not in pair}

    def _per_token(self, bytes_per_s: float | None) -> float:
        return (self.bytes_per_token.value or BYTES_PER_TOKEN) / (bytes_per_s or TRANSFER_BYTES_PER_S)
