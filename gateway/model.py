"""ServedModel: the model served here, as clients may know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's public properties, against which requests are checked."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Data type of weights and activations."""
