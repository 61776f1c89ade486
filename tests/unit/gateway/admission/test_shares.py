"""What one caller may hold while others are there."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from baton.config import GatewayConfig
from baton.request import FinishReason, RequestOutput
from baton.sampling import SamplingParams
from gateway.admission.shares import PRESENT_S, CallerShares
from gateway.auth.callers import Caller
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import (
    AbortAt,
    Effect,
    StreamEnded,
    Submitted,
    SubmitTo,
    Tick,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.request import GatewayRequest
from gateway.routing.placement import Mode
from gateway.routing.router import Router
from tests.factories.dispatching import killed, make_request
from tests.factories.routing import status

BLOCK_SIZE = 16


class UnderTest:
    """A dispatcher with one prefill worker and equal decode workers, whose room the test chooses."""

    def __init__(
        self,
        *,
        places: int = 64,
        queued: int = 10_000,
        slots: int = 0,
        blocks: int = 10_000,
        rate: float = 1e9,
        policy: Any = "round_robin",
        decodes: str = "d",
    ) -> None:
        """`decodes`: the names of the decode workers, a letter each."""
        ids, self.now, self.requests = count(), 0.0, dict[str, GatewayRequest]()
        self.slots, self.blocks, self.rate = slots, blocks, rate
        self.decodes = decodes
        router = Router(GatewayConfig(routing_policy=policy, routing_mode="disaggregated"), b"key")
        self.dispatcher = Dispatcher(
            router,
            "retry",
            lambda _: str(next(ids)),
            max_in_flight=places,
            max_queued=queued,
            placement_timeout_s=30.0,
        )
        self.placed: dict[str, str] = {}
        """The id on workers, by request; in the order of the placements."""
        self.workers: dict[str, set[str]] = {}
        """The workers that got the request at any time."""
        self.report()

    def report(self, free: int | None = None) -> None:
        """Heartbeats of all workers, each with `free` blocks."""
        free = self.blocks if free is None else free
        for name in "p" + self.decodes:
            running = sum(name in self.workers[each] for each in self.placed)
            report = status(name, running, total=self.blocks, free=free, prefill_tokens_per_s=self.rate)
            self.handle(WorkerReported(replace(report, max_num_seqs=self.slots)))

    def ask(
        self,
        caller: str,
        number: int = 1,
        prompt: int = 10,
        mode: Mode | None = None,
        affinity_key: str | None = None,
        priority: int = 0,
    ) -> None:
        for _ in range(number):
            name = f"{caller}{len(self.requests)}"
            request = make_request(
                name,
                Caller(caller),
                prompt_token_ids=(1,) * prompt,
                sampling_params=SamplingParams(max_tokens=9_000, seed=0),
                cache_salt=None,
                mode=mode,
                affinity_key=affinity_key,
                priority=priority,
            )
            self.requests[name] = request
            self.handle(Submitted(request))

    def answer(self, *names: str, number: int = 1) -> None:
        """Each request gets `number` tokens, from both workers."""
        for name in names:
            for worker in sorted(self.workers[name], reverse=True):
                end = FinishReason.HANDED_OVER if worker == "p" else None
                output = RequestOutput(
                    request_id=self.placed[name],
                    first_position=0,
                    token_ids=(7,) * (1 if end else number),
                    finish_reason=end,
                )
                self.handle(WorkerOutputs(worker, (output,)))

    def wait(self, seconds: float) -> None:
        """Lets time pass in which nothing happens. The gateway looks often, since it would count a long pause as a
        standstill."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            self.handle(Tick())

    def end(self, *names: str) -> None:
        for name in names:
            self.handle(StreamEnded(self.requests[name], GeneratorExit()))
            assert name not in self.placed

    def held(self, caller: str, worker: str = "") -> int:
        """How many of the caller's requests are placed, if named, on this worker."""
        names = [name for name in self.placed if name.startswith(caller)]
        return sum(not worker or worker in self.workers[name] for name in names)

    def handle(self, event: object) -> None:
        effects: list[Effect] = self.dispatcher.handle(event, self.now)  # type: ignore[arg-type]
        for effect in effects:
            match effect:
                case SubmitTo(worker, sub_request):
                    name = sub_request.request_id.partition(".")[0]
                    self.placed[name] = sub_request.request_id
                    self.workers.setdefault(name, set()).add(worker)
                case AbortAt(_, engine_id):
                    self.placed.pop(engine_id.partition(".")[0], None)


def test_c57_a_caller_alone_may_hold_everything_and_gives_some_back_as_soon_as_another_comes() -> None:
    under_test = UnderTest(places=64)
    under_test.ask("a", 80)
    assert under_test.held("a") == 64
    under_test.ask("b")
    assert (under_test.held("a"), under_test.held("b")) == (56, 1)
    assert list(under_test.placed) == [*(f"a{number}" for number in range(56)), "b80"], (
        "the youngest was taken back"
    )
    under_test.ask("b", 20)
    assert under_test.held("b") == 7, "and as much as 1/8 of what b might hold stays free"


def test_c57_more_urgent_requests_that_give_way_to_a_new_caller_do_not_fill_the_queue() -> None:
    under_test = UnderTest(places=128, queued=0)
    under_test.ask("a", 128)
    under_test.ask("b", priority=1)
    assert (under_test.held("a"), under_test.held("b")) == (112, 1)


def test_c57_the_caller_that_holds_most_loses_requests_when_a_third_one_has_come() -> None:
    under_test = UnderTest(places=64)
    under_test.ask("a", 80)
    under_test.ask("b", 20)
    under_test.ask("c")
    assert [under_test.held(name) for name in "abc"] == [56, 7, 1]
    under_test.report()
    assert [under_test.held(name) for name in "abc"] == [44, 16, 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_callers", [2, 8])
def test_c57_callers_that_want_everything_get_equal_shares_and_leave_room_for_the_next(
    num_callers: int,
) -> None:
    under_test = UnderTest(places=256)
    names = "abcdefgh"[:num_callers]
    for name in names:
        under_test.ask(name, 1_500)
    for _ in range(60):
        under_test.now += 0.5
        under_test.report()  # at each, the one that holds most loses requests
        under_test.end(*list(under_test.placed)[: 256 // 16])
    shares = [under_test.held(name) for name in names]
    assert max(shares) <= 1.2 * min(shares) + 1
    assert sum(shares) >= 256 * 7 * num_callers / (7 * num_callers + 1) - num_callers
    under_test.ask("z")
    assert under_test.held("z") == 1


@pytest.mark.parametrize(("room", "most"), [({"slots": 32}, 28), ({"blocks": 320}, 150)])
def test_c57_slots_and_blocks_of_a_decode_worker_are_shared(room: dict[str, Any], most: int) -> None:
    """Each request takes a block, and another one is kept for it to grow."""
    under_test = UnderTest(places=500, **room)
    under_test.ask("b")
    under_test.end("b0")
    under_test.ask("a", 400)
    assert under_test.held("a") <= most
    assert under_test.held("a") > 0.8 * most
    under_test.ask("b")
    assert under_test.held("b") == 1


@pytest.mark.parametrize(("room", "most"), [({"slots": 32}, 28), ({"blocks": 320}, 150)])
def test_c57_a_caller_alone_may_have_a_decode_worker_to_itself(room: dict[str, Any], most: int) -> None:
    under_test = UnderTest(places=500, **room)
    under_test.ask("a", 400)
    assert under_test.held("a") > most


def test_c57_a_caller_whose_answers_grow_loses_its_youngest_but_never_its_oldest() -> None:
    under_test = UnderTest(blocks=320)
    under_test.ask("b")
    under_test.ask("a", 10)
    names = [name for name in under_test.placed if name.startswith("a")]
    under_test.answer(*names, number=25 * BLOCK_SIZE)
    under_test.report(free=320 - 10 * 26 - 1)
    assert under_test.held("a") == 10, "49 blocks are free"
    under_test.report(free=20)
    assert names[0] in under_test.placed
    assert 6 <= under_test.held("a") < 10
    under_test.report(free=0)
    under_test.report(free=0)
    assert under_test.held("b") == 1, "others keep theirs"
    assert names[0] in under_test.placed


def test_c57_blocks_that_requests_share_count_once() -> None:
    under_test = UnderTest(blocks=320)
    under_test.ask("b")
    under_test.ask("a", 10)
    under_test.answer(*(name for name in under_test.placed if name.startswith("a")), number=100 * BLOCK_SIZE)
    under_test.report(free=40)
    assert under_test.held("a") == 10, "of 320 blocks, 40 are free"


def test_c57_prompts_wait_for_their_callers_turn_while_others_are_there() -> None:
    under_test = UnderTest(rate=10_000.0)
    under_test.ask("a", 40, prompt=400)
    assert under_test.held("a") == 40, "alone"
    under_test.ask("b", prompt=400)
    assert under_test.held("a") <= 3, "the others had not begun, and wait in the queue again"
    under_test.answer("a0")
    under_test.answer("a1")
    under_test.answer(*(name for name in under_test.placed if name == "a2"))
    assert under_test.held("b") == 1


def test_c57_a_long_prompt_that_was_sent_behind_a_short_one_stays() -> None:
    under_test = UnderTest(rate=10_000.0)
    under_test.ask("b")
    under_test.end("b0")
    under_test.ask("a", prompt=400)
    under_test.ask("a", prompt=4_000)
    placed = dict(under_test.placed)
    under_test.report()
    assert under_test.placed == placed
    assert len(placed) == 2


@pytest.mark.parametrize("prompts", [(8_000, 6_000), (4_000, 100)])
def test_c57_a_shorter_prompt_that_was_sent_behind_a_long_one_stays(prompts: tuple[int, int]) -> None:
    under_test = UnderTest(rate=1_000.0)
    under_test.ask("b")
    under_test.end("b0")
    for prompt in prompts:
        under_test.ask("a", prompt=prompt)
    placed = dict(under_test.placed)
    assert len(placed) == 2
    for _ in range(5):
        under_test.report()
    assert under_test.placed == placed, "it does not wait for the long one"


def test_c57_a_short_prompt_goes_to_a_prefill_worker_that_computes_anothers_long_one() -> None:
    """The worker computes it first. A decode worker would not."""
    under_test = UnderTest(rate=1_000.0)
    under_test.ask("a", prompt=4_000)
    under_test.ask("b", prompt=32)
    assert under_test.held("b") == 1
    under_test.ask("b", prompt=4_001)
    assert under_test.held("b") == 1, "a's prompt comes before it"
    under_test = UnderTest(rate=1_000.0)
    under_test.ask("a", prompt=4_000, mode=Mode.LOCAL)
    under_test.ask("b", prompt=32, mode=Mode.LOCAL)
    assert under_test.held("b") == 0


def test_c57_a_request_that_was_taken_back_is_refused_only_if_there_are_no_workers_for_it() -> None:
    under_test = UnderTest(rate=100.0)
    under_test.ask("a", 20, prompt=400)
    under_test.ask("b", prompt=400)
    assert under_test.dispatcher.num_queued == 20
    under_test.wait(40.0)
    assert under_test.dispatcher.num_queued == 19, "b's never ran, and found no room"
    for worker in "pd":
        under_test.handle(killed(worker))
    under_test.wait(40.0)
    assert under_test.dispatcher.num_queued == 0


def test_c57_a_prompt_that_a_decode_worker_computed_makes_room_for_the_next_at_once() -> None:
    """No sub-request ends then, and the next heartbeat may be half a second away."""
    under_test = UnderTest(rate=10_000.0)
    under_test.ask("a", prompt=1_000, mode=Mode.LOCAL)
    under_test.ask("b", prompt=1_000, mode=Mode.LOCAL)
    assert under_test.held("b") == 0, "a's prompt is being computed"
    first = RequestOutput(request_id=under_test.placed["a0"], first_position=0, token_ids=(7,))
    under_test.handle(WorkerOutputs("d", (first,)))
    assert under_test.held("b") == 1


def test_c57_only_callers_with_running_requests_cost_time_at_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test, num_looks = UnderTest(), count()
    for number in range(500):
        under_test.ask(f"c{number}-")
        under_test.end(f"c{number}-{number}")
    under_test.ask("a", 3)
    estimate = Router.estimate
    monkeypatch.setattr(Router, "estimate", lambda *args: (next(num_looks), estimate(*args))[1])
    under_test.report()
    assert next(num_looks) <= 4


def test_a_placement_looks_at_no_prompts_that_are_computed() -> None:
    under_test = UnderTest()
    under_test.ask("a", 20)
    under_test.ask("b")
    under_test.answer(*under_test.placed)
    under_test.ask("b")
    assert [len(states) for states in under_test.dispatcher._shares._in_prefill.values()] == [1]


def test_callers_that_hold_their_share_of_the_places_are_not_tried_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand callers may wait, and each heartbeat and each end of a request begins a sweep."""
    under_test, num_tries = UnderTest(places=200), count()
    for number in range(400):
        under_test.ask(f"c{number % 200}-")
    refusal = CallerShares.refusal
    monkeypatch.setattr(CallerShares, "refusal", lambda *args: (next(num_tries), refusal(*args))[1])
    under_test.report()
    under_test.end("c0-0")
    assert under_test.held("c0-") == 1
    assert under_test.dispatcher.num_queued == 199
    assert next(num_tries) == 1


def test_c57_a_caller_is_there_as_long_as_its_requests_run() -> None:
    under_test = UnderTest(places=64)
    under_test.ask("a", 64)
    under_test.now += PRESENT_S + 1.0
    under_test.ask("b")
    assert (under_test.held("a"), under_test.held("b")) == (56, 1)


def test_a_caller_is_there_for_a_minute_after_its_last_request() -> None:
    under_test = UnderTest(places=16)
    under_test.ask("b")
    under_test.end("b0")
    under_test.ask("a", 20)
    assert under_test.held("a") == 14
    under_test.now += PRESENT_S + 1.0
    under_test.report()
    assert under_test.held("a") == 16
    under_test.end(*(f"a{number}" for number in range(1, 21)))
    shares = under_test.dispatcher._shares
    assert shares._seen_at.keys() == {"a"}
    assert not [*shares._placements, *shares._by_caller], "nothing is kept of requests that ended"
    assert not [*shares._decoding, *shares._in_prefill], "nor of their workers"
