"""DraftModel: guesses a request's next tokens with a smaller model; knows no plan, and loads no model.

    known        ... the  quick             guessed   brown  fox
    computed               quick                      brown  fox        by the small model, one token per pass
    sampled                brown                      fox    jumps      three drafts

A draft is sampled from the small model's logits in the same way as the served model samples at that position:
with the request's temperature, filters, penalties and grammar, and with the noise of the draft's position.
Equal logits give equal tokens at any temperature, and similar logits mostly do.

A request's blocks have the same ids in every pool. So a small model with its own pool needs no block tables
of its own. If the small model consists of the served model's first layers, it uses the KV that the served
model stored. If a request has no slots for the KV of its drafts, spare blocks store this KV. The KV of drafts is only
temporary: it is computed again when the tokens at these positions are known.

Shape suffixes: T tokens of a pass, B its sequences, M blocks of the longest context, R rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baton.kv_groups import NULL_BLOCK_ID
from engine.batch import DraftedRequest, SampledRequest, StepBatch
from engine.drafts import DraftTarget
from engine.forward import Forward
from engine.group_blocks import GroupBlocks
from engine.request_table import NONE, IntArray
from engine.sampler import Sampler

CATCH_UP = 64
"""How many tokens a step computes for requests that must catch up; the tokens of one block, if a block has more. A
request must catch up if the small model's own pool lacks the KV of more of its tokens than a few steps add
(`_most_new_tokens`). On a CPU, CATCH_UP tokens take as long as one or two decode steps."""

MOST_CAUGHT_UP = 8
"""A request catches up only if it lacks the KV of at most this many tokens for each token that it may still get.
Otherwise catching up would take longer than drafts save."""


class DraftModel:
    """Guesses drafts with the small model; a `Proposer` of engine/drafts.py."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        block_size: int,
        spare_blocks: range,
        num_drafts: int,
        cost: float,
        *,
        shares_kv: bool,
    ) -> None:
        """`spare_blocks`: the spare blocks of the pool of `forward`; see `SpeculationConfig.num_spare_blocks`.

        `num_drafts`: the most drafts of a request. `cost`: the time of one pass of the small model, divided
        by that of the served model. `shares_kv`: the small model consists of the served model's first layers,
        and uses its pool.
        """
        self._forward = forward
        self._sampler = sampler
        self._block_size = block_size
        self._spare_blocks = spare_blocks
        self._num_spare_blocks = -(-num_drafts // block_size)
        """Spare blocks of each request."""
        self._most_new_tokens = max(1 + num_drafts, block_size)
        """A request lacks the KV of about this many tokens after a few steps without drafts, for example steps that
        sample the first token of another request."""
        self._shares_kv = shares_kv
        self.cost = cost

    @torch.inference_mode()
    def propose_all(self, targets: Sequence[DraftTarget]) -> list[list[int]]:
        """Guesses drafts with one pass for the first draft of all requests, one for the second, and so on."""
        assert len(targets) * self._num_spare_blocks <= len(self._spare_blocks), f"{len(targets)} requests"
        sequences = [self._begin(place, each) for place, each in enumerate(targets)]
        under_way = sequences if self._shares_kv else self._catch_up(sequences)
        while under_way:
            under_way = sorted(under_way, key=_order)
            sampling = [sequence for sequence in under_way if sequence.samples]
            batch = _batch_of(under_way, sampling, self._block_size)
            logits_RV = self._forward(batch).sampling_RV
            if sampling:
                sampled = self._sampler(logits_RV, batch.sampling_requests).wait()
                for sequence, token in zip(sampling, sampled, strict=True):
                    sequence.add(token.token_id, is_finite=token.is_finite)
            under_way = [sequence for sequence in sampling if not sequence.has_ended]
        return [sequence.drafts for sequence in sequences]

    def _begin(self, place: int, target: DraftTarget) -> "_Sequence":
        """The request's tokens in the first pass. No pool has KV of the last known token: the next step computes it."""
        spare = self._spare_blocks[place * self._num_spare_blocks :][: self._num_spare_blocks]
        start = target.request.num_tokens - 1 if self._shares_kv else target.request.num_drafting_tokens
        return _Sequence(target, np.concatenate((target.block_ids, np.array(spare))), start)

    def _catch_up(self, sequences: "list[_Sequence]") -> "list[_Sequence]":
        """Returns the sequences of which this step computes tokens in the small model's own pool.

        A request gets drafts if the small model's pool has all of its KV, except that of the last steps' tokens. All
        other requests share the step's CATCH_UP tokens; requests that lack the fewest tokens come first. If fewer of
        these tokens are left than a request lacks, the request catches up in several steps, and then gets drafts. Each
        of these steps ends at the end of a block. Otherwise the slots after the computed tokens would be cleared in a
        block that other requests may share.
        """
        num_left, under_way = max(CATCH_UP, self._block_size), []
        for sequence in sorted(sequences, key=lambda each: each.num_tokens):
            if sequence.num_tokens > self._most_new_tokens:
                if sequence.num_tokens > MOST_CAUGHT_UP * sequence.target.request.num_tokens_left:
                    sequence.cut(sequence.start)
                elif sequence.num_tokens > num_left:
                    sequence.cut((sequence.start + num_left) // self._block_size * self._block_size)
                num_left -= sequence.num_tokens
            if sequence.num_tokens:
                under_way.append(sequence)
                num_slots = len(sequence.target.block_ids) * self._block_size
                sequence.target.request.num_drafting_tokens = min(sequence.end, num_slots)
        return under_way


class _Sequence:
    """A request and its drafts so far."""

    __slots__ = ("block_ids", "drafts", "has_ended", "samples", "start", "target", "token_ids")

    def __init__(self, target: DraftTarget, block_ids: IntArray, start: int) -> None:
        self.target = target
        self.block_ids = block_ids
        self.start = start
        """Position of the first of `token_ids`."""
        self.token_ids = target.request.token_ids[start:]
        """The tokens that the next pass computes."""
        self.samples = True
        """Whether the next pass reaches the last token so far, and so samples."""
        self.drafts: list[int] = []
        self.has_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def sampled_request(self) -> SampledRequest:
        request = self.target.request
        return DraftedRequest(request, tuple(self.drafts)) if self.drafts else request

    def cut(self, end: int) -> None:
        """Removes the tokens from position `end` on, which a later step computes."""
        self.token_ids, self.samples = self.token_ids[: max(0, end - self.start)], False

    def add(self, token_id: int, *, is_finite: bool) -> None:
        """Adds the next draft."""
        self.start, self.token_ids = self.end, np.array([token_id])
        if is_finite:
            self.drafts.append(token_id)
        is_stop = token_id in self.target.request.stop_token_ids
        self.has_ended = is_stop or not is_finite or len(self.drafts) == self.target.num_tokens


def _order(sequence: _Sequence) -> tuple[bool, int]:
    """The key that sorts sequences as StepBatch requires."""
    return sequence.num_tokens > 1, -sequence.end


def _batch_of(sequences: Sequence[_Sequence], sampling: Sequence[_Sequence], block_size: int) -> StepBatch:
    """A pass over these sequences, in this order."""
    num_tokens_B = np.array([sequence.num_tokens for sequence in sequences])
    ends_B = np.array([sequence.end for sequence in sequences])
    starts_B = np.cumsum(num_tokens_B) - num_tokens_B
    num_blocks_B = -(-ends_B // block_size)
    block_ids_BM = np.full((len(sequences), num_blocks_B.max()), NULL_BLOCK_ID)
    for row, (sequence, count) in enumerate(zip(sequences, num_blocks_B, strict=True)):
        block_ids_BM[row, :count] = sequence.block_ids[:count]
    owners_T = np.repeat(np.arange(len(sequences)), num_tokens_B)
    positions_T = np.arange(len(owners_T)) + (ends_B - starts_B - num_tokens_B)[owners_T]
    slots_T = block_ids_BM[owners_T, positions_T // block_size] * block_size + positions_T % block_size
    new_tails = tuple(
        (int(block_ids_BM[row, num_blocks_B[row] - 1]), int(offset))
        for row, offset in enumerate(ends_B % block_size)
        if offset
    )
    samples_B = np.array([sequence.samples for sequence in sequences])
    return StepBatch(
        input_ids_T=np.concatenate([sequence.token_ids for sequence in sequences]),
        sources_T=np.full(len(owners_T), NONE),
        positions_T=positions_T,
        num_decodes=int((num_tokens_B == 1).sum()),
        starts_B=starts_B,
        num_tokens_B=num_tokens_B,
        context_lens_B=ends_B,
        num_blocks_B=num_blocks_B,
        blocks=(GroupBlocks(slots_T, block_ids_BM, new_tails),),
        sampling_rows_R=(starts_B + num_tokens_B - 1)[samples_B],
        sampling_requests=tuple(sequence.sampled_request for sequence in sampling),
    )
