"""PromptRows: the rows of a step that precede tokens of a prompt whose log-probabilities are wanted."""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

from dataclasses import dataclass

from baton.sampling import SamplingParams
from engine.request_table import IntArray


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive rows of a step, each with the next token of the prompt, whose log-probability is wanted."""

    request_id: str
    first_row: int
    first_position: int
    """The position of the first of these tokens in the prompt, at least 1."""
    token_ids_N: IntArray
    num_top: int
    """How many of the most likely tokens are reported with each of these tokens."""


def prompt_rows_of(
    request_id: str, prompt_N: IntArray, params: SamplingParams, first_row: int, first: int, end: int
) -> PromptRows | None:
    """The rows of a chunk with the prompt's tokens from `first` to `end`. None if no log-probabilities are wanted, or
    if the prompt has no token after position `first`."""
    if params.prompt_logprobs is None or first + 1 >= len(prompt_N):
        return None
    return PromptRows(request_id, first_row, first + 1, prompt_N[first + 1 : end + 1], params.prompt_logprobs)
