"""ServedModel: what is served here, as clients may know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model, and what their requests are held against."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
