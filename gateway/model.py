"""ServedModel: the properties of the served model that clients may know."""

from dataclasses import dataclass

from baton.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's public properties. The gateway checks requests against them."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Data type of weights and activations."""
    kv_cache_dtype: str
    """Data type of keys and values."""

    def check_name(self, name: str) -> None:
        """Raises UnknownModel if `name`, which a request contains, is another model's."""
        if name != self.name:
            raise UnknownModel("model", f"{name!r} is not served here; use {self.name!r}")
