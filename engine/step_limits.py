"""StepLimits: how large a step can be, for whoever keeps room for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """No step is larger."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
