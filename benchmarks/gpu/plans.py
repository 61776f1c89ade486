"""Step plans written by hand, for requests whose prompts count as computed.

Knows no scheduler and no tensor.
"""

import random
from collections.abc import Iterator

from baton.sampling import SamplingParams
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000_000)


class PlanMaker:
    """Makes plans. Each plan replaces the requests of the previous plan.

    The requests' blocks are scattered, as in a worker that has run for a long time.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._block_ids = list(range(1, num_blocks))
        self._rng.shuffle(self._block_ids)
        self._running: frozenset[str] = frozenset()
        self._num_plans = 0

    def step(self, contexts: list[int], num_tokens: int = 1) -> SchedulerOutput:
        """A plan with one request for each of `contexts`.

        The step computes the last `num_tokens` tokens of each request, and samples.
        """
        self._num_plans += 1
        new, first_block = [], 0
        for number, context in enumerate(contexts):
            num_blocks = -(-context // self._block_size)
            block_ids = self._block_ids[first_block : first_block + num_blocks]
            assert len(block_ids) == num_blocks, f"{len(self._block_ids)} blocks do not hold {contexts}"
            first_block += num_blocks
            request_id = f"{self._num_plans}-{number}"
            new.append(self._request(request_id, context, context - num_tokens, tuple(block_ids)))
        return self._plan(tuple(new), CachedRequestData(), dict.fromkeys(_ids(new), num_tokens))

    def prompt(self, length: int, chunk: int) -> Iterator[SchedulerOutput]:
        """Plans that compute one request's prompt in chunks; the last step samples."""
        self._num_plans += 1
        num_blocks = -(-length // self._block_size)
        assert num_blocks <= len(self._block_ids), f"{len(self._block_ids)} blocks do not hold {length}"
        new = self._request(f"{self._num_plans}-0", length, 0, tuple(self._block_ids[:num_blocks]))
        yield self._plan((new,), CachedRequestData(), {new.request_id: min(chunk, length)})
        for start in range(chunk, length, chunk):
            cached = CachedRequestData((new.request_id,), ((),), (start,))
            yield self._plan((), cached, {new.request_id: min(chunk, length - start)})

    def _request(
        self, request_id: str, context: int, num_computed_tokens: int, block_ids: tuple[int, ...]
    ) -> NewRequestData:
        return NewRequestData(
            request_id=request_id,
            prompt_token_ids=tuple(self._rng.randrange(self._vocab_size) for _ in range(context)),
            output_token_ids=(),
            sampling_params=GREEDY,
            stop_token_ids=frozenset(),
            block_ids=block_ids,
            num_computed_tokens=num_computed_tokens,
        )

    def _plan(
        self, new: tuple[NewRequestData, ...], cached: CachedRequestData, num_tokens: dict[str, int]
    ) -> SchedulerOutput:
        known = frozenset(num_tokens)
        finished, self._running = self._running - known, known
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            preempted_req_ids=frozenset(),
            finished_req_ids=finished,
        )


def _ids(requests: list[NewRequestData]) -> list[str]:
    return [request.request_id for request in requests]
