"""Behaviours 12 and 13: a grammar that is compiled, is invalid, or stops matching affects only its own requests."""

import pytest

from baton.kv import TransferRole
from baton.request import ErrorKind, FinishReason
from baton.sampling import GrammarKind, StructuredOutput
from baton.step import ModelRunnerOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    flatten,
    make_request,
    make_scheduler,
    received,
)

GRAMMAR = StructuredOutput(GrammarKind.REGEX, "yes|no")


def with_grammar(num_tokens: int = 10, **options: object) -> Request:
    return make_request(num_tokens, structured_output=GRAMMAR, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_c12_a_request_whose_grammar_is_compiled_blocks_no_other_and_keeps_its_place(policy: str) -> None:
    driver = Driver(make_scheduler(policy=policy, max_num_seqs=1))
    blocked, second, third = (
        with_grammar(arrival_time=0.0, max_tokens=1),
        make_request(arrival_time=1.0, max_tokens=1),
        make_request(arrival_time=2.0, max_tokens=1),
    )
    driver.add(blocked, second, third)
    assert list(driver.step().num_scheduled_tokens) == [second.request_id]
    assert blocked.status is RequestStatus.WAITING_FOR_FSM
    assert driver.scheduler.request_counts().waiting == 2
    assert driver.scheduler.wanted_grammars() == {GRAMMAR}
    assert driver.scheduler.grammar_compiled(GRAMMAR) == {}
    assert list(driver.step().num_scheduled_tokens) == [blocked.request_id], "it was there before the third"
    assert driver.scheduler.wanted_grammars() == frozenset()
    assert driver.scheduler.grammar_compiled(GRAMMAR, "no") == {}, "said twice, it means nothing"
    driver.run_to_end()


def test_c12_a_grammar_frees_exactly_the_requests_that_wait_for_it() -> None:
    driver = Driver(make_scheduler())
    other = StructuredOutput(GrammarKind.REGEX, "maybe")
    first, second = with_grammar(max_tokens=1), with_grammar(max_tokens=1)
    third = make_request(structured_output=other, max_tokens=1)
    driver.add(first, second, third)
    driver.scheduler.grammar_compiled(GRAMMAR)
    assert list(driver.step().num_scheduled_tokens) == [first.request_id, second.request_id]
    assert driver.scheduler.wanted_grammars() == {other}
    driver.scheduler.grammar_compiled(other)
    driver.run_to_end()


def test_c12_a_load_waits_for_its_grammar_too() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector), FakeRunner(memory=connector.memory), 0, connector)
    request = with_grammar(40, role=TransferRole.CONSUMER, max_tokens=3)
    driver.add(request)
    driver.step()
    assert connector.started == {}
    driver.scheduler.grammar_compiled(GRAMMAR)
    driver.step()
    driver.note(flatten(driver.scheduler.update_connector_output(received(request))))
    assert len(driver.run_to_end()[request.request_id]) == 3


def test_c13_a_grammar_that_does_not_compile_ends_only_its_own_request() -> None:
    driver = Driver(make_scheduler())
    broken, other = with_grammar(), make_request(max_tokens=4)
    driver.add(broken, other)
    driver.step()
    outputs = flatten(driver.scheduler.grammar_compiled(GRAMMAR, "no such rule"))
    driver.note(outputs)
    assert [(o.finish_reason, o.error, o.error_kind) for o in outputs] == [
        (FinishReason.ERROR, "no such rule", ErrorKind.INVALID_REQUEST)
    ]
    assert driver.scheduler.grammar_compiled(GRAMMAR) == {}, "too late"
    assert len(driver.run_to_end()[other.request_id]) == 4


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_c13_a_grammar_that_stops_matching_ends_only_its_own_request(num_ahead: int) -> None:
    class Runner(FakeRunner):
        def execute(self, plan):  # type: ignore[no-untyped-def]
            output = super().execute(plan)
            if broken.request_id in output.sampled_token_ids:
                steps.append(plan.step)
            failed = {broken.request_id: "nothing fits"} if plan.step in steps[2:] else {}
            return ModelRunnerOutput(output.sampled_token_ids, failed=failed)

    steps: list[int] = []
    driver = Driver(make_scheduler(), Runner(), num_ahead)
    broken, other = with_grammar(max_tokens=20), make_request(max_tokens=9)
    driver.add(broken, other)
    driver.scheduler.grammar_compiled(GRAMMAR)
    assert len(driver.run_to_end()[other.request_id]) == 9
    assert driver.ends[broken.request_id] is FinishReason.ERROR
    assert len(driver.tokens[broken.request_id]) == 3


def test_an_abort_while_a_grammar_is_compiled_leaves_nothing() -> None:
    driver = Driver(make_scheduler())
    request = with_grammar()
    driver.add(request)
    driver.note(
        flatten(driver.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED))
    )
    driver.run_to_end()
