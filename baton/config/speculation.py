"""The configuration's section `speculation`: tokens that are known or guessed ahead, and computed together."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section

KEYS: dict[str, set[str]] = {
    "off": set(),
    "ngram": {"num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"},
    "draft_model": {"num_speculative_tokens", "draft_model", "draft_quantization", "draft_layers"},
}
"""By method: the keys that it uses, among the keys that only some methods use."""


def _without_effect(method: str) -> set[str]:
    return set().union(*KEYS.values()) - KEYS[method]


class SpeculationConfig(Section):
    """Speculative decoding: tokens guessed ahead (drafts), verified in one step. Jump decoding: tokens that a grammar
    forces, computed in one step. Neither changes the tokens of an answer."""

    method: Literal["off", "ngram", "draft_model"] = "off"
    """`ngram`: if a request's last tokens occurred before in its prompt or answer, the tokens that followed there are
    its drafts. `draft_model`, on CPUs: a smaller model guesses; set the key `draft_model` or `draft_layers`.
    """
    num_speculative_tokens: int = Field(4, ge=1, le=16)
    """The most drafts of one request in one step. A request whose drafts are rarely right gets fewer."""
    prompt_lookup_min: int = Field(2, ge=1)
    """`ngram`: at least this many of the last tokens must have occurred before."""
    prompt_lookup_max: int = Field(4, ge=1)
    """`ngram`: at most this many of the last tokens are searched for; the longest match wins."""
    draft_model: str | None = Field(None, min_length=1)
    """`draft_model`: the model that guesses, as in `model.path`. It must have the served model's vocabulary. It may be
    the served model itself with another `draft_quantization`."""
    draft_quantization: Literal["auto", "none", "int8", "int4"] | None = None
    """`draft_model`: how the model of the key `draft_model` keeps its matrices, as in `model.quantization`. If unset:
    like the served model."""
    draft_layers: int | None = Field(None, ge=1)
    """`draft_model`: guesses come from this many of the first layers of the served model, not from another model.
    Their weights take no further memory. All workers must have one rank."""
    forced_tokens: bool | None = None
    """Append the tokens that a structured output's grammar forces, without a step for each of them. It needs a CPU. If
    unset: yes on a CPU, no on a GPU."""

    @field_validator(
        "method",
        mode="before",
        json_schema_input_type=Literal["off", "ngram", "draft_model"] | Literal[False],
    )
    @classmethod
    def _read_yaml(cls, method: object) -> object:
        """Accepts false as `off`, since YAML 1.1 reads a bare `off` as false."""
        return "off" if method is False else method

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not be above prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        given = {key for key in self.model_fields_set if getattr(self, key) is not None}
        if unused := sorted(given & _without_effect(self.method)):
            method = " or ".join(f"'{other}'" for other in KEYS if unused[0] not in _without_effect(other))
            raise ValueError(
                f"{unused[0]} ({getattr(self, unused[0])}) has no effect with method '{self.method}'; set method to "
                f"{method}"
            )
        if self.method == "draft_model" and (self.draft_model is None) == (self.draft_layers is None):
            raise ValueError(
                "method 'draft_model' needs draft_model (another model) or draft_layers (the served model's first "
                f"layers); set one of the two keys, not {'both' if self.draft_model else 'neither'}"
            )
        if self.draft_layers is not None and self.draft_quantization is not None:
            raise ValueError(
                f"draft_quantization ({self.draft_quantization}) has no effect with draft_layers, which share the "
                "served model's weights; remove one of the two keys"
            )
        return self

    @property
    def num_drafts(self) -> int:
        """The most drafts of one request in one step; 0: there are none."""
        return 0 if self.method == "off" else self.num_speculative_tokens

    def num_spare_blocks(self, block_size: int, max_num_seqs: int) -> int:
        """How many blocks of each pool are kept for the drafts of all requests of a step. The scheduler does not count
        these blocks."""
        return (
            0
            if self.method != "draft_model"
            else max_num_seqs * -(-self.num_speculative_tokens // block_size)
        )
