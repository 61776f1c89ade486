"""The runner's state of requests, and how a plan becomes arrays."""

import pytest
import torch

from baton.kv_groups import KVGroups
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from engine.batch import RequestBatch, RunnerRequest, StepBatch
from engine.layers.paged_attention import MIN_GROUP_BLOCKS, decode_groups
from engine.request_table import GrowingArray
from tests.factories.stepping import make_request_data

BLOCK_SIZE = 4


def new(
    request_id: str, prompt: list[int], blocks: list[int], *, computed: int = 0, outputs: tuple[int, ...] = ()
) -> NewRequestData:
    return make_request_data(
        prompt, outputs, request_id=request_id, block_ids=blocks, num_computed_tokens=computed
    )


def plan(
    tokens: dict[str, int],
    *,
    new: tuple[NewRequestData, ...] = (),
    cached: dict[str, tuple[tuple[int, ...], int]] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
    drafts: dict[str, tuple[int, ...]] | None = None,
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
        scheduled_spec_decode_tokens=drafts or {},
    )


def without_drafts(built: StepBatch) -> list[RunnerRequest]:
    """The requests that sample, none of which has drafts."""
    requests = [request for request in built.sampling_requests if isinstance(request, RunnerRequest)]
    assert len(requests) == len(built.sampling_requests)
    return requests


def sample(batch: RequestBatch, built: StepBatch, *token_ids: int) -> None:
    for row, (request, token_id) in enumerate(zip(without_drafts(built), token_ids, strict=True)):
        batch.set_token(request, batch.append_unknown(request, row), token_id)


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
    assert built.blocks[0].slots_T.tolist() == [9 * 4 + 1, 5 * 4 + 1, 28, 29, 30]
    assert built.num_decodes == 2
    assert built.starts_B.tolist() == [0, 1, 2]
    assert built.num_tokens_B.tolist() == [1, 1, 3]
    assert built.context_lens_B.tolist() == [6, 2, 3]
    assert built.blocks[0].block_ids_BM.tolist() == [[2, 9], [5, 0], [7, 0]]
    assert built.num_blocks_B.tolist() == [2, 1, 1]
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
    assert built.blocks[0].slots_T.tolist() == [3 * 4 + 3, 6 * 4]
    assert built.sampling_rows_R.tolist() == [1]
    assert built.blocks[0].block_ids_BM.tolist() == [[3, 6]]


def test_a_handed_over_request_starts_with_the_token_that_came_along() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 1}, new=(new("a", [1, 2, 3, 4], [3, 6], computed=4, outputs=(77,)),))
    batch.update(step)
    built = batch.build(step)
    assert built.input_ids_T.tolist() == [77]
    assert built.positions_T.tolist() == [4]
    assert built.sampling_requests[0].num_output_tokens == 1
    assert built.blocks[0].new_tails == ((6, 1),)


def test_a_resumed_request_has_a_new_table_and_all_its_tokens() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    first = plan({"a": 2}, new=(new("a", [1, 2], [3]),))
    batch.update(first)
    sample(batch, batch.build(first), 50)
    batch.update(plan({}))
    resumed = plan({"a": 3}, cached={"a": ((9,), 0)}, resumed={"a": 3})
    batch.update(resumed)
    built = batch.build(resumed)
    assert built.input_ids_T.tolist() == [1, 2, 50]
    assert built.blocks[0].slots_T.tolist() == [36, 37, 38]
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
        seen.append(built.blocks[0].new_tails)
        sample(batch, built, 0)
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
    built = batch.build(step)
    groups = list(decode_groups(built, built.blocks[0].block_ids_BM, torch.device("cpu")))
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
    b, a = without_drafts(built)
    tokens_to_come = [batch.append_unknown(r, row) for row, r in enumerate((b, a))]
    second = plan({"a": 1, "b": 1}, cached={"a": ((), 2), "b": ((), 1)})
    batch.update(second)
    built = batch.build(second)
    assert built.input_ids_T.tolist() == [0, 0]
    assert built.sources_T.tolist() == [1, 0]
    later = batch.append_unknown(a, 0)
    for request, index, token_id in ((b, tokens_to_come[0], 60), (a, tokens_to_come[1], 70)):
        batch.set_token(request, index, token_id)
    third = plan({"a": 1, "b": 1}, cached={"a": ((), 3), "b": ((), 1)})
    batch.update(third)
    built = batch.build(third)
    assert built.input_ids_T.tolist() == [0, 60]
    assert built.sources_T.tolist() == [0, -1], "the last token of one is known by now"
    batch.set_token(a, later, 71)
    assert a.token_ids.tolist() == [1, 2, 70, 71]
    built = batch.build(third)
    assert (built.input_ids_T.tolist(), built.sources_T.tolist()) == ([71, 60], [-1, -1])


def test_a_token_for_a_finished_request_changes_no_other_request() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    first = plan({"a": 1}, new=(new("a", [1], [3]),))
    batch.update(first)
    (gone,) = without_drafts(batch.build(first))
    index = batch.append_unknown(gone, 0)
    second = plan({"b": 1}, new=(new("b", [9], [4]),), finished=("a",))
    batch.update(second)
    batch.set_token(gone, index, 77)
    assert batch.build(second).input_ids_T.tolist() == [9]


def test_hundreds_of_requests_come_and_go() -> None:
    """The table grows in both directions, and rows that are free again are used again."""
    batch = RequestBatch(BLOCK_SIZE)
    for wave in range(3):
        names = [f"{wave}-{i}" for i in range(150)]
        requests = tuple(
            new(name, [i] * (i + 1), list(range(1, i // BLOCK_SIZE + 2)), computed=i)
            for i, name in enumerate(names)
        )
        gone = tuple(f"{wave - 1}-{i}" for i in range(150)) if wave else ()
        step = plan(dict.fromkeys(names, 1), new=requests, finished=gone)
        batch.update(step)
        built = batch.build(step)
        assert built.input_ids_T.tolist() == list(range(149, -1, -1))
        assert built.context_lens_B.tolist() == list(range(150, 0, -1))
        assert built.blocks[0].block_ids_BM[0].tolist() == list(range(1, 39))
        assert built.blocks[0].block_ids_BM[-1].tolist() == [1] + [0] * 37
    assert len(batch) == 150
    assert len(batch._table.num_tokens_S) < 2 * 150


def test_only_a_prompts_last_token_samples() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 1}, new=(new("a", [5, 6, 7], [3], computed=1),))
    batch.update(step)
    built = batch.build(step)
    assert (built.input_ids_T.tolist(), built.sampling_requests) == ([6], ())


def test_a_plan_beyond_the_known_tokens_is_a_bug() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 3}, new=(new("a", [1, 2], [3]),))
    batch.update(step)
    with pytest.raises(AssertionError, match="3 tokens scheduled for a"):
        batch.build(step)


def test_growing_array_keeps_what_it_was_given() -> None:
    array = GrowingArray((1, 2))
    for value in range(100):
        array.append(value)
    assert array.values.tolist() == [1, 2, *range(100)]
    empty = GrowingArray(())
    assert empty.values.tolist() == []
    empty.append(7)
    assert empty.values.tolist() == [7]


def test_counts_of_truncated_tokens_are_dropped() -> None:
    """A request that loses one token, and then gets another one, is as long as before."""
    request = RunnerRequest(new("a", [1, 2], [3], outputs=(5, 6)))
    request.token_counts.follow(request.token_ids)
    request.truncate(3)
    request.append_token(7)
    request.token_counts.follow(request.token_ids)
    assert request.token_counts.tokens.tolist() == [1, 2, 5, 7]


def test_a_request_with_drafts_is_as_many_decodes_each_of_which_sees_those_before() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan(
        {"chunk": 2, "drafted": 3, "long": 1},
        new=(
            new("chunk", [10, 11, 12], [7]),
            new("drafted", [20, 21, 22], [5, 6], computed=2),
            new("long", [30, 31, 32, 33, 34, 35], [2, 9], computed=5),
        ),
        drafts={"drafted": (23, 24)},
    )
    batch.update(step)
    built = batch.build(step)
    assert built.input_ids_T.tolist() == [35, 22, 23, 24, 10, 11]
    assert built.positions_T.tolist() == [5, 2, 3, 4, 0, 1]
    assert built.blocks[0].slots_T.tolist() == [9 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4, 28, 29]
    assert built.num_decodes == 4
    assert built.starts_B.tolist() == [0, 1, 2, 3, 4]
    assert built.num_tokens_B.tolist() == [1, 1, 1, 1, 2]
    assert built.context_lens_B.tolist() == [6, 3, 4, 5, 2]
    assert built.blocks[0].block_ids_BM.tolist() == [[2, 9], [5, 0], [5, 0], [5, 6], [7, 0]]
    assert built.sampling_rows_R.tolist() == [0, 1, 2, 3]
    sampled = [(r.request_id, r.drafts, r.num_output_tokens) for r in built.sampling_requests]
    assert sampled == [
        ("long", (), 0),
        ("drafted", (), 0),
        ("drafted", (23,), 1),
        ("drafted", (23, 24), 2),
    ]
    assert (6, 1) in built.blocks[0].new_tails


def test_a_drafted_request_counts_its_drafts_and_leaves_the_requests_counts_alone() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    step = plan({"a": 3}, new=(new("a", [1, 2], [3, 4], computed=2, outputs=(2,)),), drafts={"a": (2, 7)})
    batch.update(step)
    own, _, drafted = batch.build(step).sampling_requests
    assert drafted.count_tokens().tokens.tolist() == [1, 2, 7]
    assert drafted.count_tokens().counts.tolist() == [1, 3, 1]
    assert drafted.count_outputs().counts.tolist() == [2, 1]
    assert own.count_tokens().counts.tolist() == [1, 2]
    assert own.count_outputs().counts.tolist() == [1]


def test_drafts_before_other_tokens_or_behind_an_unknown_one_are_a_mistake_of_the_scheduler() -> None:
    batch = RequestBatch(BLOCK_SIZE)
    early = plan({"a": 3}, new=(new("a", [1, 2, 3, 4], [3]),), drafts={"a": (7,)})
    batch.update(early)
    with pytest.raises(AssertionError, match="1 tokens scheduled for a behind 1 drafts; it has 4 to compute"):
        batch.build(early)
    whole = plan({"a": 4}, cached={"a": ((), 0)})
    batch.update(whole)
    (request,) = without_drafts(batch.build(whole))
    batch.append_unknown(request, 0)
    ahead = plan({"a": 2}, cached={"a": ((4,), 4)}, drafts={"a": (7,)})
    batch.update(ahead)
    with pytest.raises(AssertionError, match="1 tokens scheduled for a behind 1 drafts"):
        batch.build(ahead)


def test_a_groups_table_holds_its_longest_context_even_if_that_is_a_draft() -> None:
    batch = RequestBatch(1)
    num_tokens = 2 * MIN_GROUP_BLOCKS + 3
    step = plan(
        {"long": 4, "short": 5},
        new=(
            new("long", [1] * num_tokens, list(range(1, num_tokens + 4)), computed=num_tokens - 1),
            new("short", [1] * 9, list(range(40, 53)), computed=8),
        ),
        drafts={"long": (2, 3, 4), "short": (2, 3, 4, 5)},
    )
    batch.update(step)
    built = batch.build(step)
    groups = list(decode_groups(built, built.blocks[0].block_ids_BM, torch.device("cpu")))
    assert sum(len(group.context_lens_B) for group in groups) == built.num_decodes
    for group in groups:
        assert group.block_ids_BM.shape[1] == int(group.context_lens_B.max())


def test_each_group_has_its_own_blocks_and_none_that_left_its_window() -> None:
    """Blocks of 4 and a window of 5: token 8 attends to 4 to 8, and so to nothing of the first row."""
    batch = RequestBatch(BLOCK_SIZE, KVGroups(1, 1, 5))
    step = plan({"a": 2}, new=(new("a", list(range(10, 20)), [7, 3, 8, 4, 9, 5], computed=8),))
    batch.update(step)
    built = batch.build(step)
    full, windowed = built.blocks
    assert full.block_ids_BM.tolist() == [[7, 8, 9]]
    assert windowed.block_ids_BM.tolist() == [[0, 4, 5]]
    assert full.slots_T.tolist() == [9 * 4, 9 * 4 + 1]
    assert windowed.slots_T.tolist() == [5 * 4, 5 * 4 + 1]
    assert (full.new_tails, windowed.new_tails) == (((9, 2),), ((5, 2),))
    assert built.positions_T.tolist() == [8, 9]
    sample(batch, built, 99)
    later = plan({"a": 1}, cached={"a": ((), 10)})
    batch.update(later)
    assert batch.build(later).blocks[1].new_tails == (), "cleared already"


def test_groups_whose_layers_all_have_windows() -> None:
    batch = RequestBatch(BLOCK_SIZE, KVGroups(0, 1, 5))
    step = plan({"a": 1}, new=(new("a", list(range(10, 19)), [7, 8, 9], computed=8),))
    batch.update(step)
    built = batch.build(step)
    assert built.blocks[0].block_ids_BM.tolist() == [[0, 8, 9]]
    assert len(built.blocks) == 1
