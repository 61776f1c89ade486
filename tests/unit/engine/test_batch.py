"""What the runner remembers, and how a plan becomes tensors."""

import numpy as np
import pytest
import torch

from baton.sampling import SamplingParams
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from engine.batch import GrowingArray, RequestBatch, StepBatch
from engine.layers.decode_groups import MIN_GROUP_BLOCKS, decode_groups

BLOCK_SIZE = 4


def new(
    request_id: str, prompt: list[int], blocks: list[int], *, computed: int = 0, outputs: tuple[int, ...] = ()
) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        output_token_ids=outputs,
        sampling_params=SamplingParams(),
        stop_token_ids=frozenset(),
        block_ids=tuple(blocks),
        num_computed_tokens=computed,
    )


def plan(
    tokens: dict[str, int],
    *,
    new: tuple[NewRequestData, ...] = (),
    cached: dict[str, tuple[tuple[int, ...], int]] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    cached = cached or {}
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            request_ids=tuple(cached),
            resumed_num_tokens=resumed or {},
            new_block_ids=tuple(blocks for blocks, _ in cached.values()),
            num_computed_tokens=tuple(computed for _, computed in cached.values()),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=frozenset(),
        finished_req_ids=frozenset(finished),
    )


def sample(built: StepBatch, *token_ids: int) -> None:
    for row, (request, token_id) in enumerate(zip(built.sampling_requests, token_ids, strict=True)):
        request.settle(request.append_unknown(row), token_id)


def test_decodes_come_first_longest_first_then_chunks() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan(
        {"chunk": 3, "short": 1, "long": 1},
        new=(
            new("chunk", [10, 11, 12, 13, 14], [7, 8]),
            new("short", [20, 21], [5], computed=1),
            new("long", [30, 31, 32, 33, 34, 35], [2, 9], computed=5),
        ),
    )
    batch.update(step)
    built = batch.build(step)
    assert built.input_ids_T.tolist() == [35, 21, 10, 11, 12]
    assert built.positions_T.tolist() == [5, 1, 0, 1, 2]
    assert built.slots_T.tolist() == [9 * 4 + 1, 5 * 4 + 1, 28, 29, 30]
    assert [(r.start, r.context_len, r.block_ids.tolist()) for r in built.decodes] == [
        (0, 6, [2, 9]),
        (1, 2, [5]),
    ]
    (chunk,) = built.prefills
    assert (chunk.start, chunk.num_tokens, chunk.num_computed_tokens) == (2, 3, 0)
    assert chunk.block_ids.tolist() == [7]
    assert [request.request_id for request in built.sampling_requests] == ["long", "short"]
    assert built.sampling_rows_R.tolist() == [0, 1]


def test_a_request_samples_when_its_known_tokens_are_through() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    first = plan({"a": 3}, new=(new("a", [1, 2, 3, 4, 5], [3]),))
    batch.update(first)
    assert batch.build(first).sampling_requests == ()
    second = plan({"a": 2}, cached={"a": ((6,), 3)})
    batch.update(second)
    built = batch.build(second)
    assert built.input_ids_T.tolist() == [4, 5]
    assert built.slots_T.tolist() == [3 * 4 + 3, 6 * 4]
    assert built.sampling_rows_R.tolist() == [1]
    assert built.prefills[0].block_ids.tolist() == [3, 6]


def test_a_handed_over_request_starts_with_the_token_that_came_along() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 1}, new=(new("a", [1, 2, 3, 4], [3, 6], computed=4, outputs=(77,)),))
    batch.update(step)
    built = batch.build(step)
    assert built.input_ids_T.tolist() == [77]
    assert built.positions_T.tolist() == [4]
    assert built.sampling_requests[0].num_output_tokens == 1
    assert built.new_tails == ((6, 1),)


def test_a_resumed_request_has_a_new_table_and_all_its_tokens() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    first = plan({"a": 2}, new=(new("a", [1, 2], [3]),))
    batch.update(first)
    sample(batch.build(first), 50)
    batch.update(plan({}))
    resumed = plan({"a": 3}, cached={"a": ((9,), 0)}, resumed={"a": 3})
    batch.update(resumed)
    built = batch.build(resumed)
    assert built.input_ids_T.tolist() == [1, 2, 50]
    assert built.slots_T.tolist() == [36, 37, 38]
    assert built.sampling_rows_R.tolist() == [2]


def test_finished_requests_are_forgotten_and_ids_may_return() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    batch.update(plan({"a": 1}, new=(new("a", [1], [3]),)))
    batch.update(plan({}, finished=("a", "never seen")))
    assert len(batch) == 0
    again = plan({"a": 2}, new=(new("a", [8, 9], [4]),), finished=("a",))
    batch.update(again)
    assert batch.build(again).input_ids_T.tolist() == [8, 9]


def test_a_last_block_is_cleared_once_per_block() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 1}, new=(new("a", [1], [3]),))
    seen = []
    for position in range(6):
        batch.update(step)
        built = batch.build(step)
        seen.append(built.new_tails)
        sample(built, 0)
        blocks = (8,) if position + 1 == BLOCK_SIZE else ()
        step = plan({"a": 1}, cached={"a": (blocks, position + 1)})
    assert seen == [((3, 1),), (), (), (), ((8, 1),), ()]


def test_groups_pad_at_most_by_half() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    lengths = [1, 2, 30, 33, 40, 64, 65, 200, 390, 400]
    requests = []
    for number, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE)
        requests.append(new(str(number), [0] * length, list(range(1, num_blocks + 1)), computed=length - 1))
    step = plan({request.request_id: 1 for request in requests}, new=tuple(requests))
    batch.update(step)
    groups = list(decode_groups(batch.build(step).decodes, torch.device("cpu")))
    assert sum(len(group.context_lens_B) for group in groups) == len(lengths)
    assert [group.start for group in groups] == [
        sum(len(g.context_lens_B) for g in groups[:i]) for i in range(len(groups))
    ]
    for group in groups:
        used = [-(-length // BLOCK_SIZE) for length in group.context_lens_B.tolist()]
        width = group.block_ids_BM.shape[1]
        assert max(used) == width
        assert width <= MIN_GROUP_BLOCKS or min(used) > width // 2


def test_a_token_that_only_the_device_knows_is_named_by_its_row() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    first = plan({"a": 2, "b": 1}, new=(new("a", [1, 2], [3]), new("b", [5], [4])))
    batch.update(first)
    built = batch.build(first)
    assert built.sources_T.tolist() == [-1, -1, -1]
    b, a = built.sampling_requests
    tokens_to_come = [r.append_unknown(row) for row, r in enumerate((b, a))]
    second = plan({"a": 1, "b": 1}, cached={"a": ((), 2), "b": ((), 1)})
    batch.update(second)
    built = batch.build(second)
    assert built.input_ids_T.tolist() == [0, 0]
    assert built.sources_T.tolist() == [1, 0]
    later = a.append_unknown(0)
    for request, index, token_id in ((b, tokens_to_come[0], 60), (a, tokens_to_come[1], 70)):
        request.settle(index, token_id)
    assert b.sampled_row is None
    assert a.sampled_row == 0, "its next token is not known yet"
    a.settle(later, 71)
    assert a.token_ids.tolist() == [1, 2, 70, 71]
    third = plan({"b": 1}, cached={"b": ((), 1)})
    batch.update(third)
    built = batch.build(third)
    assert (built.input_ids_T.tolist(), built.sources_T.tolist()) == ([60], [-1])


def test_a_plan_beyond_the_known_tokens_is_a_bug() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 3}, new=(new("a", [1, 2], [3]),))
    batch.update(step)
    with pytest.raises(AssertionError, match="3 tokens scheduled for a"):
        batch.build(step)


def test_growing_array_keeps_what_it_was_given() -> None:
    array = GrowingArray((1, 2))
    for value in range(100):
        array.extend((value, value + 1))
    expected = [1, 2, *(v for value in range(100) for v in (value, value + 1))]
    assert np.array_equal(array.values, expected)
    assert GrowingArray(()).values.tolist() == []
