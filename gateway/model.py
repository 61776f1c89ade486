"""ServedModel: the properties of the served model that clients may know."""

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.errors import InvalidRequest, UnknownModel
from baton.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's public properties. The gateway checks requests against them."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Data type of activations, and of weights that are not quantized."""
    kv_cache_dtype: str
    """Data type of keys and values."""
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    """The model's own values of the settings in `MODEL_DEFAULTS`, for requests that do not set them."""

    def check_name(self, name: str | None) -> None:
        """Raises UnknownModel if `name` is another model's. None: the request names no model."""
        if name not in (None, self.name):
            raise UnknownModel("model", f"{name!r} is not served here; use {self.name!r}")

    def check_token_ids(self, field: str, token_ids: Collection[int]) -> None:
        """Raises InvalidRequest for `field` if one of the request's token ids is no token of the model."""
        size = self.vocab_size
        if token_ids and (largest := max(token_ids)) >= size:
            problem = f"{largest} is not one of the model's {size} tokens; ids are 0 to {size - 1}"
            raise InvalidRequest(field, problem)
