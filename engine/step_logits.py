"""StepLogits: what a step computes from its hidden states: logits of the rows that sample, and prompt logprobs.

Prompt logprobs are the log-probabilities of a prompt's own tokens, each from the logits of the row before it. If they
are not wanted, no logits are computed for rows within a prompt. Prompt logprobs are computed here, a few rows at a
time: the logits of a long chunk would take more memory than the device has to spare. Nothing here waits for the
device.

Shape suffixes: R rows that sample, N rows of PromptRows, V vocabulary, C a row's own token and its likeliest tokens.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.request import PackedLogprobs
from baton.step import ChunkLogprobs
from engine.device import pinned, to_host
from engine.prompt_rows import PromptRows

ROWS_AT_ONCE = 64

LogitsOf = Callable[[slice], torch.Tensor]
"""Computes the logits, N x V, of consecutive rows of a step. The logits are valid until the next call."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of a few rows, on their way to the host."""

    token_ids_NC: torch.Tensor
    logprobs_NC: torch.Tensor
    ranks_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class PendingChunkLogprobs:
    """The prompt logprobs that a step computes for one request; they can be read once the step is computed."""

    rows: PromptRows
    parts: tuple[_Part, ...]

    @property
    def are_finite(self) -> bool:
        """False: the rows' logits contain NaN or infinity."""
        return all(bool(part.logprobs_NC[:, 0].isfinite().all()) for part in self.parts)

    @property
    def logprobs(self) -> ChunkLogprobs:
        packed = PackedLogprobs(
            token_ids=_joined((part.token_ids_NC for part in self.parts), np.uint32),
            logprobs=_joined((part.logprobs_NC for part in self.parts), np.float32),
            ranks=_joined((part.ranks_N for part in self.parts), np.uint32),
        )
        return ChunkLogprobs(self.rows.first_position, packed)


def _joined(parts: Iterable[torch.Tensor], dtype: npt.DTypeLike) -> bytes:
    return b"".join(part.numpy().astype(dtype).tobytes() for part in parts)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The results of a step."""

    sampling_RV: torch.Tensor | None
    """The logits of the rows that sample, valid until the next step; None if no row samples."""
    prompt_logprobs: tuple[PendingChunkLogprobs, ...] = ()


def start_prompt_logprobs(
    prompt_rows: Sequence[PromptRows], logits_of: LogitsOf, device: torch.device
) -> tuple[PendingChunkLogprobs, ...]:
    """Queues the work for all rows of these prompts."""
    return tuple(PendingChunkLogprobs(rows, tuple(_parts(rows, logits_of, device))) for rows in prompt_rows)


def _parts(rows: PromptRows, logits_of: LogitsOf, device: torch.device) -> Iterator[_Part]:
    token_ids_N = pinned(rows.token_ids_N, device).to(device, non_blocking=True)
    for start in range(0, len(token_ids_N), ROWS_AT_ONCE):
        own_N = token_ids_N[start : start + ROWS_AT_ONCE]
        first_row = rows.first_row + start
        yield _logprobs_of(logits_of(slice(first_row, first_row + len(own_N))), own_N, rows.num_top)


def _logprobs_of(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> _Part:
    logprobs_NV = logits_NV.to(torch.float32).log_softmax(-1)
    own_N1 = logprobs_NV.gather(1, token_ids_N[:, None])
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]))
    return _Part(
        token_ids_NC=to_host(torch.cat((token_ids_N[:, None], top.indices), 1)),
        logprobs_NC=to_host(torch.cat((own_N1, top.values), 1)),
        ranks_N=to_host((logprobs_NV > own_N1).sum(-1) + 1),
    )
