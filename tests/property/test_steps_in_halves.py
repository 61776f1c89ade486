"""Behaviour 56: only the requests that break their steps fail. The others get the same tokens as without them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import ErrorKind, FinishReason, RequestOutput
from baton.step import KVConnectorOutput, SchedulerOutput
from scheduler import RequestStatus
from tests.factories.engine import (
    FakeBlockMover,
    PlansPastPrompts,
    StepHook,
    make_core,
    make_engine_request,
)
from tests.factories.scheduling import token_at
from worker.core import MAX_FAILED_STEPS, EngineCore

PEER = WorkerRef("p0", "incarnation", ("tcp://127.0.0.1:1",), 16)


class Breaks:
    """Fails each step that computes one of these requests at or after its position."""

    def __init__(self, positions: dict[str, int]) -> None:
        self.positions = positions
        self.num_failures = 0
        self._starts: dict[str, int] = {}

    def __call__(self, plan: SchedulerOutput) -> None:
        starts = plan.num_computed_tokens()
        for name, num_tokens in plan.num_scheduled_tokens.items():
            if starts[name] + num_tokens > self.positions.get(name, 10**6):
                self.num_failures += 1
                raise ValueError(f"{name} breaks the step")


def run(core: EngineCore) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(5_000):
        outputs += [output for part in core.step().values() for output in part]
        if not core.may_progress:
            return outputs
    raise AssertionError("the engine does not come to rest")


def tokens_of(outputs: list[RequestOutput], name: str) -> list[int]:
    """The tokens of the request; checks that they come in order, each position once."""
    tokens: list[int] = []
    for output in outputs:
        if output.request_id == name:
            assert output.first_position == len(tokens)
            tokens += output.token_ids
    return tokens


def ends_of(outputs: list[RequestOutput]) -> dict[str, RequestOutput]:
    ended = [output for output in outputs if output.finish_reason is not None]
    assert len({output.request_id for output in ended}) == len(ended), "each ends once"
    return {output.request_id: output for output in ended}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    culprit=st.integers(0, 8),
    position=st.integers(0, 70),
    max_tokens=st.integers(1, 12),
    stem=st.integers(0, 40),
    asynchronous=st.booleans(),
    settings=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([16, 40, 1024]),
            "num_blocks": st.sampled_from([14, 101]),
            "max_num_seqs": st.sampled_from([2, 16]),
            "preemption": st.just("recompute"),
        }
    )
    | st.just({"preemption": "swap", "num_swap_blocks": 6, "num_blocks": 14}),
)
def test_c56_a_request_that_breaks_its_steps_ends_alone_and_others_get_the_same_tokens(
    lengths: list[int],
    culprit: int,
    position: int,
    max_tokens: int,
    stem: int,
    asynchronous: bool,
    settings: dict[str, Any],
) -> None:
    poison = f"r{culprit % len(lengths)}"
    breaks = Breaks({poison: position})
    core = make_core(StepHook(breaks), async_scheduling=asynchronous, **settings)
    for i, length in enumerate(lengths):
        prompt = (7,) * stem + (10 + i,) * length
        core.add_request(make_engine_request(f"r{i}", prompt_token_ids=prompt, max_tokens=max_tokens), "g")
    outputs = run(core)
    ends = ends_of(outputs)
    for i, length in enumerate(lengths):
        name, end = f"r{i}", ends[f"r{i}"]
        tokens = tokens_of(outputs, name)
        assert tokens == [token_at(name, at) for at in range(len(tokens))]
        if name == poison and position < stem + length + max_tokens - 1:
            assert end.error_kind is ErrorKind.STEP_FAILED
            assert str(end.error).endswith(f"ValueError: {poison} breaks the step")
            assert len(tokens) == max(0, position - (stem + length) + 1), "all that it could have"
        else:
            assert end.finish_reason is FinishReason.LENGTH
            assert len(tokens) == max_tokens
    assert breaks.num_failures <= 5 * (1 + asynchronous), (
        "halves of nine, each once, and what was planned behind them"
    )
    assert core.scheduler.kv_block_counts().free == core.scheduler.kv_block_counts().total
    core.scheduler.check_integrity()
    core.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("num_requests", "culprits"),
    [(14, range(8, 14)), (8, [0, 7]), (16, [0, 4, 8, 12]), (2, [0, 1]), (4, range(4)), (32, range(16, 32))],
    ids=["in one half", "in both halves", "in every quarter", "two alone", "four alone", "a whole half"],
)
def test_c56_several_that_break_their_steps_end_and_the_device_goes_on(
    num_requests: int, culprits: Sequence[int], asynchronous: bool
) -> None:
    breaks = Breaks({f"r{i}": 3 for i in culprits})
    core = make_core(StepHook(breaks), async_scheduling=asynchronous, max_num_seqs=num_requests)
    for i in range(num_requests):
        core.add_request(make_engine_request(f"r{i}", max_tokens=5), "g")
    ends = ends_of(run(core))
    wrong = {name for name, end in ends.items() if end.error_kind is ErrorKind.STEP_FAILED and end.error}
    assert wrong == breaks.positions.keys()
    others = ends.keys() - wrong
    assert all(ends[name].finish_reason is FinishReason.LENGTH for name in others)
    core.close()


def test_c56_requests_that_come_one_after_another_to_an_idle_device_do_not_end_it() -> None:
    """For example, a gateway sends each of two requests to its only worker three times."""
    names = [f"r{i}" for i in range(6)]
    core = make_core(StepHook(Breaks(dict.fromkeys(names, 0))))
    for name in names:
        core.add_request(make_engine_request(name), "g")
        assert ends_of(run(core))[name].error_kind is ErrorKind.STEP_FAILED
    core.close()


def test_c56_a_device_that_computes_no_request_at_all_is_at_fault_itself() -> None:
    breaks = Breaks({f"r{i}": 0 for i in range(MAX_FAILED_STEPS)})
    core = make_core(StepHook(breaks))
    for name in breaks.positions:
        core.add_request(make_engine_request(name), "g")
    with pytest.raises(RuntimeError, match=f"failed to compute {MAX_FAILED_STEPS} steps in a row"):
        run(core)
    core.close()


def test_c56_a_request_that_ends_while_it_is_tried_does_not_hold_up_those_that_wait() -> None:
    pipeline = PlansPastPrompts(StepHook(Breaks({"poison": 0})))
    core = make_core(pipeline=pipeline, max_num_seqs=2, max_num_batched_tokens=32)
    for name in ("poison", "other"):
        core.add_request(make_engine_request(name, prompt_token_ids=(1,) * 16), "g")
    core.add_request(make_engine_request("waits"), "g")
    for _ in range(3):
        core.step()
    assert core.scheduler.is_trying
    core.finish_requests(["poison", "other"], RequestStatus.FINISHED_ABORTED)
    assert ends_of(run(core)).keys() == {"waits"}
    core.close()


def test_c56_a_request_whose_culprit_ended_under_way_is_tried_alone() -> None:
    core = make_core(pipeline=PlansPastPrompts(StepHook(Breaks({"poison": 0}))))
    for name in ("poison", "other"):
        core.add_request(make_engine_request(name, max_tokens=3), "g")
    core.step()
    core.finish_requests(["poison"], RequestStatus.FINISHED_ABORTED)
    assert ends_of(run(core))["other"].finish_reason is FinishReason.LENGTH
    core.close()


def test_c56_a_load_behind_hits_is_given_back_when_a_step_fails() -> None:
    """The blocks that it hit might never have been computed; a load without hits stays."""
    connector, breaks = FakeBlockMover(), Breaks({"poison": 40})
    core = make_core(pipeline=PlansPastPrompts(StepHook(breaks)), connector=connector)
    core.add_request(make_engine_request("poison", prompt_token_ids=(7,) * 40, max_tokens=9), "g")
    core.add_request(make_engine_request("other", max_tokens=9), "g")
    core.step()
    for name, token in (("hits", 7), ("misses", 8)):
        transfer = KVTransferParams(TransferRole.CONSUMER, name, 0, PEER)
        request = make_engine_request(name, prompt_token_ids=(token,) * 64, kv_transfer=transfer)
        core.add_request(request, "g")
    outputs = run(core)
    ends = ends_of(outputs)
    assert {name: end.error_kind for name, end in ends.items() if end.error} == {
        "poison": ErrorKind.STEP_FAILED,
        "hits": ErrorKind.GIVEN_BACK,
    }
    assert tokens_of(outputs, "other") == [token_at("other", at) for at in range(9)]
    assert core.scheduler.request_counts().waiting_for_remote_kvs == 1
    core.finish_requests(["misses"], RequestStatus.FINISHED_ABORTED)
    connector.outputs.append(KVConnectorOutput(quiesced=("hits", "misses")))
    run(core)
    assert core.scheduler.kv_block_counts().free == core.scheduler.kv_block_counts().total
    core.close()
