"""TorchForward: computes a step's logits from its arrays, by plain torch; knows no request, keeps no state.

Shape suffixes: T tokens of a step, E hidden size, R rows that sample, V vocabulary.
"""

from typing import Protocol

import numpy as np
import torch

from engine.batch import StepBatch
from engine.layers.attention import Attention
from engine.layers.backend import InputTokens
from engine.models.decoder import Decoder
from engine.step_logits import StepLogits, start_prompt_logprobs

_ANY_ROW = np.zeros(1, np.int64)
"""Row 0. If the step samples no token, the last layer returns this row, since no layer accepts zero rows."""


class Forward(Protocol):
    """Runs a model over a KV pool. On an asynchronous device a call returns when the work is queued."""

    def __call__(self, batch: StepBatch) -> StepLogits:
        """Computes the step's tokens, and stores their KV in their blocks."""
        ...


class PagedAttentions(Protocol):
    """Attention over one KV pool."""

    def prepare(self, batch: StepBatch) -> Attention:
        """Prepares the attention of one step. Only one step at a time may use the result."""
        ...


class TorchForward:
    """Runs eagerly, one step at a time."""

    def __init__(self, decoder: Decoder, attention: PagedAttentions, device: torch.device) -> None:
        self._decoder = decoder
        self._attention = attention
        self._device = device

    def __call__(self, batch: StepBatch) -> StepLogits:
        assert (batch.sources_T < 0).all(), "the host does not know a token yet"
        input_ids_T = torch.from_numpy(batch.input_ids_T).to(self._device)
        samples = bool(batch.sampling_requests)
        rows_R = torch.from_numpy(batch.sampling_rows_R if samples else _ANY_ROW).to(self._device)
        is_whole = bool(batch.prompt_rows) or len(rows_R) == len(input_ids_T)
        hidden_RE = self._decoder.forward(
            InputTokens(input_ids_T), self._attention.prepare(batch), None if is_whole else rows_R
        )
        prompt_logprobs = start_prompt_logprobs(
            batch.prompt_rows, lambda rows: self._decoder.logits(hidden_RE[rows]), self._device
        )
        if batch.prompt_rows:
            hidden_RE = hidden_RE[rows_R]
        return StepLogits(self._decoder.logits(hidden_RE) if samples else None, prompt_logprobs)
