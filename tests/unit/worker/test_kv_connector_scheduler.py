"""The scheduler half: what happens to requests becomes the right commands, driven by the real scheduler."""

import pytest

from baton.kv import TransferRole
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    ImmediateCommand,
    KVConnectorMetadata,
    LoadBlocks,
    NoteStarvation,
    SendBlocks,
    WithdrawBlocks,
)
from scheduler import RequestStatus, Scheduler
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import (
    FakeRunner,
    failed,
    make_config,
    make_request,
    received,
)
from worker.kv_connector_scheduler import KVConnectorScheduler

PRODUCER, CONSUMER = TransferRole.PRODUCER, TransferRole.CONSUMER


def make_scheduler(groups: KVGroups = ONE_GROUP, **overrides: object) -> Scheduler:
    connector = KVConnectorScheduler(16, groups)
    return Scheduler(make_config(**overrides), connector, hash_key=b"k" * 16, kv_groups=groups)


def step(scheduler: Scheduler, runner: FakeRunner) -> KVConnectorMetadata | None:
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, runner.execute(plan))
    metadata = plan.kv_connector_metadata
    assert metadata is None or isinstance(metadata, KVConnectorMetadata)
    return metadata


def test_a_producer_sends_each_chunks_full_blocks_and_its_tail_with_the_end() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=24), FakeRunner(lambda *_: 9)
    request = make_request(40, role=PRODUCER)
    scheduler.add_request(request)
    assert request.kv_transfer is not None
    first = step(scheduler, runner)
    assert first == KVConnectorMetadata(
        (BeginSend(request.request_id, request.kv_transfer, 40),),
        (),
        (SendBlocks(request.request_id, 0, (1,)),),
    )
    second = step(scheduler, runner)
    assert second == KVConnectorMetadata((), (), (SendBlocks(request.request_id, 1, (2,)),))
    third = step(scheduler, runner)
    assert third == KVConnectorMetadata(
        (FinishSend(request.request_id, 3, (3,), FirstToken(9, None)),), (), ()
    )
    assert step(scheduler, runner) is None


def test_a_prompt_of_whole_blocks_has_no_tail() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(lambda *_: 9)
    request = make_request(32, role=PRODUCER)
    scheduler.add_request(request)
    first, second = step(scheduler, runner), step(scheduler, runner)
    assert first is not None
    assert second is not None
    assert first.after == (SendBlocks(request.request_id, 0, (1, 2)),)
    assert second.at_once == (FinishSend(request.request_id, 2, (), FirstToken(9, None)),)


def test_blocks_that_were_in_the_prefix_cache_are_sent_too() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    prompt = range(40)
    scheduler.add_request(make_request(prompt=prompt, max_tokens=1))
    step(scheduler, runner)
    request = make_request(prompt=prompt, role=PRODUCER)
    scheduler.add_request(request)
    metadata = step(scheduler, runner)
    assert metadata is not None
    assert [len(command.block_ids) for command in metadata.after] == [2]
    assert metadata.after[0].first_index == 0


def test_c41_a_preempted_producer_takes_its_blocks_back_before_others_write_them() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=32), FakeRunner(lambda *_: 9)
    request = make_request(60, role=PRODUCER)
    scheduler.add_request(request)
    step(scheduler, runner)
    scheduler.reset_prefix_cache(force=True)
    again = step(scheduler, runner)
    assert again is not None
    assert again.at_once == (WithdrawBlocks(request.request_id),)
    assert [command.first_index for command in again.after] == [0]
    rest = step(scheduler, runner)
    assert rest is not None
    assert [command.first_index for command in rest.after] == [2]


@pytest.mark.parametrize("how", ["aborted", "its step failed"])
def test_c41_a_producer_that_lost_its_blocks_takes_them_back_even_if_it_ends_before_the_next_step(
    how: str,
) -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=32), FakeRunner(lambda *_: 9)
    request = make_request(60, role=PRODUCER)
    scheduler.add_request(request)
    step(scheduler, runner)
    if how == "aborted":
        scheduler.reset_prefix_cache(force=True)
        scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    else:
        scheduler.retry_in_halves(scheduler.schedule(), [], "on fire")
    withdrawn, ended = _at_once(step(scheduler, runner))
    assert withdrawn == WithdrawBlocks(request.request_id)
    assert isinstance(ended, AbortSend)
    assert not ended.is_held


def test_c41_a_producer_without_blocks_takes_none_back() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner(lambda *_: 9)
    first, second = make_request(60, role=PRODUCER), make_request(60, role=PRODUCER)
    for request in (first, second):
        scheduler.add_request(request)
    step(scheduler, runner)
    scheduler.finish_requests([second.request_id], RequestStatus.FINISHED_ABORTED)
    assert WithdrawBlocks not in map(type, _at_once(step(scheduler, runner)))


def test_a_consumer_announces_itself_loads_once_and_is_quiet_after_arrival() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = make_request(40, role=CONSUMER)
    scheduler.add_request(request)
    assert request.kv_transfer is not None
    metadata = step(scheduler, runner)
    assert metadata is not None
    assert metadata.at_once == (BeginLoad(request.request_id, request.kv_transfer, 40),)
    assert metadata.loads == (LoadBlocks(request.request_id, 0, (1, 2, 3)),)
    scheduler.update_connector_output(received(request))
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert step(scheduler, runner) is None


def test_c39_a_consumer_that_ends_before_it_had_room_still_tells_its_producer() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = make_request(40, role=CONSUMER)
    scheduler.add_request(request)
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    metadata = step(scheduler, runner)
    assert metadata is not None
    assert [type(command) for command in metadata.at_once] == [BeginLoad, AbortLoad]


def test_c40_a_producer_that_ended_otherwise_cancels_and_says_whether_the_prompt_is_still_wanted() -> None:
    for status, is_unneeded, reason in (
        (RequestStatus.FINISHED_ABORTED, True, "the request ended on the prefill worker"),
        (RequestStatus.FINISHED_ERROR, False, "the prefill failed"),
        (RequestStatus.FINISHED_GIVEN_BACK, False, "the prefill worker gave the request back"),
    ):
        scheduler, runner = make_scheduler(max_num_batched_tokens=16), FakeRunner()
        request = make_request(40, role=PRODUCER)
        scheduler.add_request(request)
        step(scheduler, runner)
        scheduler.finish_requests([request.request_id], status)
        metadata = step(scheduler, runner)
        assert metadata is not None
        (command,) = metadata.at_once
        assert isinstance(command, AbortSend)
        assert (command.reason, command.is_unneeded, command.is_held) == (reason, is_unneeded, True)
        assert scheduler.kv_block_counts().leased == 1


def test_c30_how_much_can_be_loaded_is_known_from_the_first_step_on_and_asked_for_once() -> None:
    connector = KVConnectorScheduler(16)
    scheduler, runner = Scheduler(make_config(), connector, hash_key=b"k" * 16), FakeRunner()
    request = make_request(40, role=CONSUMER)
    scheduler.add_request(request)
    for num_hit_tokens in (0, 16, 32):  # no message of the producer has arrived yet
        assert connector.get_num_new_matched_tokens(request, num_hit_tokens) == 40 - num_hit_tokens
    step(scheduler, runner)
    assert scheduler.request_counts().waiting_for_remote_kvs == 1, "it does not wait to be asked about again"
    scheduler.update_connector_output(failed(request))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {request.request_id: 40}


def test_c31_starvation_is_told_when_it_begins_and_when_it_ends_and_not_where_there_is_room() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner(lambda *_: 9)
    first, second = make_request(60, role=PRODUCER), make_request(60, role=PRODUCER)
    scheduler.add_request(first)
    commands = _at_once(step(scheduler, runner))
    assert NoteStarvation not in map(type, commands)
    scheduler.add_request(second)
    assert _at_once(step(scheduler, runner))[-1] == NoteStarvation(is_starved=True)
    assert step(scheduler, runner) is None
    scheduler.update_connector_output(KVConnectorOutput(finished_sending=(first.request_id,)))
    assert _at_once(step(scheduler, runner)) == (NoteStarvation(is_starved=False),)


def _at_once(metadata: KVConnectorMetadata | None) -> tuple[ImmediateCommand, ...]:
    return metadata.at_once if metadata is not None else ()


TWO = KVGroups(1, 1, 32)


def test_c27_a_producer_sends_no_rows_that_have_left_the_window_when_the_prompt_is_complete() -> None:
    """Token 72 attends to 41 to 72, and so to no token of rows 0 and 1."""
    scheduler = make_scheduler(TWO, max_num_batched_tokens=48)
    runner = FakeRunner(lambda *_: 9, PagedMemory(16, TWO))
    request = make_request(72, role=PRODUCER)
    scheduler.add_request(request)
    first, second, third = (step(scheduler, runner) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.after == (SendBlocks(request.request_id, 0, (1, None, 2, None, 3, 6)),)
    assert second.after == (SendBlocks(request.request_id, 6, (7, 9)),)
    assert third.at_once == (FinishSend(request.request_id, 10, (8, 10), FirstToken(9, None)),)


def test_c27_a_consumer_loads_no_rows_that_have_left_the_window() -> None:
    scheduler, runner = make_scheduler(TWO), FakeRunner(memory=PagedMemory(16, TWO))
    request = make_request(72, role=CONSUMER)
    scheduler.add_request(request)
    metadata = step(scheduler, runner)
    assert metadata is not None
    (load,) = metadata.loads
    assert load.first_index == 0
    assert [block_id is None for block_id in load.block_ids] == [i in (1, 3) for i in range(10)]
