"""The configuration's section `speculation`: tokens that are known or guessed ahead, and computed together."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section


class SpeculationConfig(Section):
    """Speculative decoding: tokens guessed ahead (drafts), verified in one step. Jump decoding: tokens that a grammar
    forces, computed in one step. Every answer keeps its tokens."""

    method: Literal["off", "ngram"] = "off"
    """`ngram`: where a request's last tokens occurred before in its prompt or answer, the tokens that followed them
    there are its drafts."""
    num_speculative_tokens: int = Field(4, ge=1, le=16)
    """The most drafts of one request in one step. A request whose drafts are rarely right gets fewer."""
    prompt_lookup_min: int = Field(2, ge=1)
    """`ngram`: the fewest of the last tokens that must have occurred before."""
    prompt_lookup_max: int = Field(4, ge=1)
    """`ngram`: the most of the last tokens that are searched for; the longest match wins."""
    forced_tokens: bool | None = None
    """Append the tokens that a structured output's grammar forces, without a step for each. It needs a CPU. None: on
    a CPU, yes; on a GPU, no."""

    @field_validator("method", mode="before")
    @classmethod
    def _read_yaml(cls, method: object) -> object:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if method is False else method

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not be above prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.method == "off" and (unused := self.model_fields_set - {"method", "forced_tokens"}):
            key = min(unused)
            raise ValueError(
                f"{key} ({getattr(self, key)}) has no effect with method 'off'; set method to 'ngram'"
            )
        return self

    @property
    def num_drafts(self) -> int:
        """The most drafts of one request in one step; 0: there are none."""
        return 0 if self.method == "off" else self.num_speculative_tokens
