"""How busy a worker says it is: averages over its last steps, and what waits."""

from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.kv import TransferRole
from baton.sampling import GrammarKind, StructuredOutput
from baton.step import ModelRunnerOutput, SchedulerOutput
from scheduler.load import waiting_load
from scheduler.request import RequestStatus
from tests.factories.driving import Driver
from tests.factories.engine import Held, RunningLoop, StepHook, make_core, make_engine_request
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    flatten,
    make_request,
    make_scheduler,
    received,
    token_at,
)
from worker.load import LoadMeter
from worker.step_counts import PromptTokens


@pytest.mark.parametrize(("num_prompt_tokens", "num_decodes"), [(0, 3), (1, 60)])
def test_steps_that_computed_prompts_give_a_rate_and_others_a_time(
    num_prompt_tokens: int, num_decodes: int
) -> None:
    """A step with many decodes and one token of a cached prompt says nothing about the speed of prompts."""
    meter = LoadMeter()
    assert (meter.prefill_tokens_per_s, meter.decode_step_s) == (0.0, 0.0)
    meter.step_done(100, 3, submitted_at=10.0, done_at=10.5)
    meter.step_done(num_prompt_tokens, num_decodes, submitted_at=11.0, done_at=11.02)
    assert meter.prefill_tokens_per_s == pytest.approx(200.0)
    assert meter.decode_step_s == pytest.approx(0.02)


def test_a_step_begins_when_the_one_before_it_ends() -> None:
    """The device computes one while the next is submitted."""
    meter = LoadMeter()
    meter.step_done(0, 1, submitted_at=1.0, done_at=1.1)
    meter.step_done(0, 1, submitted_at=1.0, done_at=1.2)
    assert meter.decode_step_s == pytest.approx(0.1)
    meter.step_done(0, 0, submitted_at=1.15, done_at=1.2)
    assert meter.decode_step_s == pytest.approx(0.1), "nothing was computed"


def test_averages_follow_what_happens_and_stay_while_nothing_does() -> None:
    meter, now = LoadMeter(), 0.0
    for time_s in [0.1] * 50 + [0.3] * 200:
        meter.step_done(0, 1, now, now + time_s)
        now += time_s
    assert meter.decode_step_s == pytest.approx(0.3, rel=1e-3)
    meter.step_done(10, 1, now + 1_000, now + 1_001)
    assert meter.decode_step_s == pytest.approx(0.3, rel=1e-3)
    assert meter.prefill_tokens_per_s == pytest.approx(10.0)


def test_long_steps_weigh_as_much_as_they_last() -> None:
    meter = LoadMeter()
    meter.step_done(1_000, 1, 0.0, 1.0)
    meter.step_done(300, 1, 1.0, 2.0)
    assert 600 < meter.prefill_tokens_per_s < 650


def test_small_steps_do_not_make_a_worker_seem_slow() -> None:
    """A step takes 8 ms, plus 0.1 ms for each token. Short prompts come for a while, then long prompts again."""
    meter, now = LoadMeter(), 0.0
    rates = []
    for num_tokens in [20] * 50 + [1_500] + [20] * 1_000 + [600, 128, 20]:
        done_at = now + 0.008 + 0.0001 * num_tokens
        meter.step_done(num_tokens, 1, now, done_at)
        now = done_at
        rates.append(meter.prefill_tokens_per_s)
    assert rates[49] == pytest.approx(2_000)  # nothing else is known yet
    assert rates[50:-3] == pytest.approx([1_500 / 0.158] * 1_001)
    assert 600 / 0.068 < rates[-3] < 1_500 / 0.158
    assert rates[-1] == rates[-2] == rates[-3]


def test_what_waits_is_what_is_to_be_computed_here() -> None:
    waiting, halfway, decoding = (make_request(100, arrival_time=time) for time in (7.0, 5.0, 3.0))
    for request in (halfway, decoding):
        request.move_to(RequestStatus.RUNNING)
    halfway.num_computed_tokens = 60
    decoding.num_computed_tokens = 99
    elsewhere = make_request(100, arrival_time=1.0, role=TransferRole.CONSUMER)
    load = waiting_load([waiting, halfway, decoding, elsewhere])
    assert (load.num_prompt_tokens, load.oldest_arrival) == (140, 7.0)
    elsewhere.may_load = False  # its prompt did not come: it is computed here
    assert waiting_load([elsewhere]).num_prompt_tokens == 100
    elsewhere.num_computed_tokens = 100
    elsewhere.all_token_ids.append(7)  # its prompt came, and token 0 with it
    load = waiting_load([elsewhere])
    assert (load.num_prompt_tokens, load.oldest_arrival) == (0, 1.0)
    assert waiting_load([]).oldest_arrival is None


def test_requests_that_begin_again_after_a_failed_step_do_not_wait_for_their_first_step() -> None:
    driver = Driver(make_scheduler(), num_ahead=1)
    old, young = make_request(20, arrival_time=1.0), make_request(20, arrival_time=2.0)
    driver.add(old)
    driver.step()
    driver.complete()
    driver.add(young)
    driver.step()
    driver.fail()
    assert (old.status, young.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    assert waiting_load([old, young]).oldest_arrival == 2.0
    driver.run_to_end()


def test_c61_drafts_are_no_prompt_tokens() -> None:
    clock = VirtualClock()

    def guess(request_id: str, position: int) -> tuple[int, ...]:
        return tuple(token_at(request_id, position + ahead) for ahead in range(3))

    class Slow(FakeRunner):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            clock.advance(0.5)
            return super().execute(plan)

    settings: dict[str, Any] = {
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "num_speculative_tokens": 3,
    }
    core = make_core(Slow(guess=guess), clock=clock, **settings)
    core.add_request(make_engine_request(num_tokens=10, max_tokens=5), "gateway")
    core.step()
    core.step()
    assert (core.steps.num_prompt_tokens, core.steps.num_decode_tokens) == (10, 4)
    core.add_request(make_engine_request("other", num_tokens=20, max_tokens=5), "gateway")
    core.add_request(make_engine_request("third", num_tokens=30, max_tokens=5), "gateway")
    core.step()
    core.add_request(make_engine_request("last", num_tokens=40, max_tokens=5), "gateway")
    core.step()  # its prompt beside the drafts of two requests
    assert (core.steps.num_prompt_tokens, core.steps.num_decode_tokens) == (100, 12)
    load, _ = core.load()
    assert load.prefill_tokens_per_s == pytest.approx(90, abs=1)  # of the steps with 50 and 40 tokens
    assert load.decode_step_s == 0.5


def test_a_part_of_one_token_is_part_of_a_prompt() -> None:
    """The end of a prompt, one whose other tokens were in the cache, and one beside outputs in a full step."""
    driver = Driver(make_scheduler(max_num_batched_tokens=4), FakeRunner())
    counts = PromptTokens()

    def counted(num_steps: int) -> list[tuple[int, int]]:
        plans = [driver.step() for _ in range(num_steps)]
        return [(counts.count(plan), plan.total_num_scheduled_tokens) for plan in plans]

    driver.add(make_request(prompt=range(5_000, 5_017), max_tokens=3))
    assert counted(7) == [(4, 4)] * 4 + [(1, 1), (0, 1), (0, 1)]
    driver.add(make_request(prompt=range(5_000, 5_017), max_tokens=1))
    assert counted(1) == [(1, 1)]
    for _ in range(3):
        driver.add(make_request(1, max_tokens=9))
    driver.add(make_request(3, max_tokens=3))
    assert counted(4) == [(4, 4), (1, 4), (1, 4), (0, 4)]
    driver.run_to_end()


def test_a_prompt_that_ends_halfway_is_forgotten() -> None:
    driver, counts = Driver(make_scheduler(max_num_batched_tokens=4), FakeRunner()), PromptTokens()
    driver.add(make_request(10, request_id="aborted"))
    assert counts.count(driver.step()) == 4
    driver.note(flatten(driver.scheduler.finish_requests(["aborted"], RequestStatus.FINISHED_ABORTED)))
    assert counts.count(driver.step()) == 0
    assert counts._uncomputed == {}


def test_the_token_behind_a_received_or_swapped_in_prompt_is_no_prompt() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, num_blocks=6, preemption="swap", num_swap_blocks=8)
    driver, counts = Driver(scheduler, FakeRunner(memory=connector.memory)), PromptTokens()
    old, young = (make_request(n, max_tokens=20, role=TransferRole.CONSUMER) for n in (47, 31))
    driver.add(old, young)
    num_prompt_tokens = [counts.count(driver.step())]
    for request in (old, young):
        driver.note(flatten(scheduler.update_connector_output(received(request))))
    while driver.scheduler.has_requests():
        num_prompt_tokens.append(counts.count(driver.step()))
    assert scheduler.counters()["swap_preemptions"] == 1
    assert set(num_prompt_tokens) == {0}


def test_a_received_prompt_that_is_computed_here_after_a_failed_step_is_a_prompt() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector)
    driver, counts = Driver(scheduler, FakeRunner(memory=connector.memory), num_ahead=1), PromptTokens()
    first, other = (make_request(n, max_tokens=4, role=TransferRole.CONSUMER) for n in (40, 30))
    driver.add(first, other)
    counts.count(driver.step())
    for request in (first, other):
        driver.note(flatten(scheduler.update_connector_output(received(request))))
    driver.step()
    driver.fail()  # from now on, each of them computes alone
    assert counts.count(driver.step()) == 41, "the prompt and the token that came with it"
    driver.run_to_end()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_c64_a_forced_run_of_several_steps_is_no_prompt(is_preempted: bool) -> None:
    def force(request_id: str, position: int) -> tuple[int, ...]:
        return tuple(token_at(request_id, 1 + i) for i in range(20)) if position == 1 else ()

    grammar = StructuredOutput(GrammarKind.REGEX, "whatever the runner says")
    driver = Driver(
        make_scheduler(max_num_batched_tokens=8, enable_prefix_caching=False), FakeRunner(force=force)
    )
    forced = make_request(10, max_tokens=30, structured_output=grammar)
    driver.add(forced)
    driver.note(flatten(driver.scheduler.grammar_compiled(grammar)))
    counts, prompt_tokens = PromptTokens(), list[int]()

    def step() -> None:
        prompt_tokens.append(counts.count(driver.step()))

    for _ in range(3):
        step()
    assert prompt_tokens == [8, 2, 0]
    if is_preempted:
        driver.scheduler.reset_prefix_cache(force=True)
    else:
        driver.add(make_request(9, max_tokens=2))
    for _ in range(4):
        step()
    if is_preempted:
        assert prompt_tokens[3:] == [8, 8, 8, 7], "it computes all of its tokens anew"
    else:
        assert prompt_tokens[3:] == [0, 3, 6, 0], "the prompt of the other one"
    driver.run_to_end()


def test_an_engine_measures_itself() -> None:
    device = Held(step_s=0.01)
    with RunningLoop(make_core(StepHook(device), max_num_seqs=1, async_scheduling=False)) as running:
        running.loop.submit("gateway", make_engine_request("first", 50, max_tokens=8))
        assert device.entered.wait(60)
        for name in ("second", "third"):
            running.loop.submit("gateway", make_engine_request(name, 50, max_tokens=8))
        device.go_on.set()
        while (busy := running.loop.snapshot).load.num_queued_prompt_tokens != 100:
            running.next_output()
        assert busy.oldest_arrival is not None
        running.until_finished("third")
        running.loop.submit("gateway", make_engine_request("last", max_tokens=1))
        running.until_finished("last")
    idle = running.loop.snapshot
    assert (idle.load.num_queued_prompt_tokens, idle.load.oldest_waiting_s, idle.oldest_arrival) == (
        0,
        0.0,
        None,
    )
    assert 0.005 < idle.load.decode_step_s < 1.0
    assert idle.load.prefill_tokens_per_s > 0.0
