"""Prompts that the two ends of their hand-overs take in different orders: no two wait for each other.

Real schedulers, connectors and endpoints of whole workers, in one thread on virtual time; no device.
"""

import pytest

from baton.config import SchedulerConfig
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole
from baton.request import FinishReason
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from baton.step import ClientOutputs, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from scheduler import Request, RequestStatus, Scheduler
from tests.factories.endpoints import LOAD_TIMEOUT_S, Fabric, Worker
from worker.kv_connector_scheduler import KVConnectorScheduler

NUM_USABLE = 8
"""Blocks of every worker. A prompt of LONG tokens takes 6 of them, and two do not fit."""
LONG, SHORT = 96, 48
GRAMMAR = StructuredOutput(GrammarKind.REGEX, "[a-z]+")


class Engine:
    """Steps a worker's scheduler: every token is 7, and takes no time."""

    def __init__(
        self, fabric: Fabric, worker: Worker, *, max_num_seqs: int = 8, max_num_batched_tokens: int = 512
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=256,
            num_blocks=1 + NUM_USABLE,
            async_scheduling=False,
        )
        self.worker = worker
        self.scheduler = Scheduler(config, KVConnectorScheduler(16))
        self.ended: dict[str, FinishReason] = {}
        self._fabric = fabric
        self._running: dict[str, Request] = {}

    def add(
        self,
        name: str,
        role: TransferRole,
        peer: "Engine",
        num_tokens: int = LONG,
        *,
        has_grammar: bool = False,
    ) -> None:
        params = SamplingParams(
            max_tokens=2, ignore_eos=not has_grammar, structured_output=GRAMMAR if has_grammar else None
        )
        first = 1_000 * ord(name[0]) + 100 * ord(name[-1])
        request = Request(
            name,
            tuple(range(first, first + num_tokens)),
            params,
            arrival_time=self._fabric.clock.now(),
            kv_transfer=KVTransferParams(role, name, 0, peer.worker.ref, OnLoadFailure.REPORT),
        )
        self._running[name] = request
        self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput:
        connector = self.worker.connector
        self._note(self.scheduler.update_connector_output(connector.get_finished()))
        plan = self.scheduler.schedule()
        metadata = plan.kv_connector_metadata
        connector.send_commands(metadata)
        connector.start_load_kv(metadata)
        connector.save_kv_blocks(metadata, set())
        requests = [self._running[name] for name in plan.num_scheduled_tokens]
        sampled = {r.request_id: [7] for r in requests if r.num_computed_tokens == r.num_tokens}
        self._note(self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled)))
        self.scheduler.check_integrity()
        return plan

    def _note(self, news: ClientOutputs) -> None:
        for output in (output for part in news.values() for output in part):
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason


def hand_over(name: str, producer: Engine, consumer: Engine, num_tokens: int = LONG) -> None:
    """Adds both ends, which have exchanged nothing yet."""
    consumer.add(name, TransferRole.CONSUMER, producer, num_tokens)
    producer.add(name, TransferRole.PRODUCER, consumer, num_tokens)


def add_in_two_orders(p: Engine, d: Engine, num_tokens_of_a: int = LONG, num_tokens_of_b: int = LONG) -> None:
    """D takes A before it knows of B, and P takes B before it knows of A."""
    d.add("A", TransferRole.CONSUMER, p, num_tokens_of_a)
    d.step()
    p.add("B", TransferRole.PRODUCER, d, num_tokens_of_b)
    p.step()
    d.add("B", TransferRole.CONSUMER, p, num_tokens_of_b)
    p.add("A", TransferRole.PRODUCER, d, num_tokens_of_a)


def run(fabric: Fabric, *engines: Engine, seconds: float = LOAD_TIMEOUT_S / 2) -> None:
    """Runs the engines for well below the time after which a load fails."""
    end = fabric.clock.now() + seconds
    while fabric.clock.now() < end:
        for _ in range(4):
            for engine in engines:
                engine.step()
            fabric.deliver()
        fabric.advance(0.125)


def assert_all_decoded(fabric: Fabric, producers: list[Engine], consumers: list[Engine], names: str) -> None:
    """Every prompt was handed over and decoded by its own consumer, and no block is left in use."""
    ended = {name: reason for engine in consumers for name, reason in engine.ended.items()}
    assert ended == dict.fromkeys(names.split(), FinishReason.LENGTH)
    handed_over = {name: reason for engine in producers for name, reason in engine.ended.items()}
    assert handed_over == dict.fromkeys(names.split(), FinishReason.HANDED_OVER)
    for engine in producers + consumers:
        blocks = engine.scheduler.kv_block_counts()
        assert blocks.free == blocks.total == NUM_USABLE
        assert engine.scheduler.counters().get("kv_load_failures", 0) == 0
        assert engine.worker.connector.counters().get("kv_loads_failed", 0) == 0
    fabric.assert_at_rest()


def num_postponed(*engines: Engine) -> int:
    return sum(engine.scheduler.counters().get("kv_prompt_loads_postponed", 0) for engine in engines)


@pytest.mark.parametrize("transport", ["shared_memory", "zmq_tcp"])
@pytest.mark.parametrize(("num_budget", "num_tokens"), [(512, LONG), (48, SHORT)])
def test_c31_a_load_and_a_lease_that_wait_for_each_others_room(
    transport: str, num_budget: int, num_tokens: int
) -> None:
    """D reserves for A, which waits for blocks on P; those hold B, which waits for room on D.

    With a short B, A gets some blocks on P, sends some pieces, runs out of blocks, and so on in circles.
    """
    fabric = Fabric(transport)
    p = Engine(fabric, fabric.add("p0"), max_num_batched_tokens=num_budget)
    d = Engine(fabric, fabric.add("d0"), max_num_batched_tokens=num_budget)
    add_in_two_orders(p, d, num_tokens_of_b=num_tokens)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B")
    assert num_postponed(d) == 1


def test_c31_a_grammar_that_is_compiled_later_on_one_end() -> None:
    """There is one gateway, and requests are served in the order of arrival. Still, the two ends have
    different orders."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"))
    d.add("A", TransferRole.CONSUMER, p, has_grammar=True)
    p.add("A", TransferRole.PRODUCER, d, has_grammar=True)
    hand_over("B", p, d)
    d.scheduler.grammar_compiled(GRAMMAR)
    d.step()
    p.step()
    p.scheduler.grammar_compiled(GRAMMAR)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B")


def test_c31_a_load_that_has_the_last_slot() -> None:
    """There is room for both, but loads take no more slots than there are."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"), max_num_seqs=1)
    add_in_two_orders(p, d, num_tokens_of_a=SHORT)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B")


def test_c31_others_wait_before_and_behind_those_that_wait_for_each_other() -> None:
    """G and H come between on both ends, so the prompt that must continue is first neither on P nor on D."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"))
    d.add("A", TransferRole.CONSUMER, p)
    d.step()
    p.add("B", TransferRole.PRODUCER, d)
    p.step()
    for name in "GH":
        hand_over(name, p, d)
    p.add("A", TransferRole.PRODUCER, d)
    d.add("B", TransferRole.CONSUMER, p)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B G H")


def test_c31_two_pairs_that_wait_for_each_other_in_a_ring() -> None:
    """Each D has reserved blocks for a prompt that waits on its P. That P's blocks hold a prompt for the other D."""
    fabric = Fabric("shared_memory")
    p0, p1 = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("p1"))
    d0, d1 = Engine(fabric, fabric.add("d0")), Engine(fabric, fabric.add("d1"))
    for p, d, other, number in ((p0, d0, d1, 0), (p1, d1, d0, 1)):
        d.add(f"A{number}", TransferRole.CONSUMER, p)
        d.step()
        p.add(f"B{number}", TransferRole.PRODUCER, other)
        p.step()
    for p, d, other, number in ((p0, d0, d1, 0), (p1, d1, d0, 1)):
        p.add(f"A{number}", TransferRole.PRODUCER, d)
        other.add(f"B{number}", TransferRole.CONSUMER, p)
    run(fabric, p0, p1, d0, d1)
    assert_all_decoded(fabric, [p0, p1], [d0, d1], "A0 A1 B0 B1")


@pytest.mark.parametrize(("num_given", "num_taken"), [(2, 4), (4, 2)])
def test_c47_all_ranks_of_a_load_are_put_off(num_given: int, num_taken: int) -> None:
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0", num_given)), Engine(fabric, fabric.add("d0", num_taken))
    add_in_two_orders(p, d)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B")
    assert num_postponed(d) == 1


def test_c31_a_consumer_that_is_only_busy_has_nothing_put_off() -> None:
    """Both ends have one order. So every load that begins goes through, however little room there is."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"))
    for name in "ABCDEF":
        hand_over(name, p, d)
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A B C D E F")
    assert num_postponed(d) == 0


def test_c31_a_load_that_was_put_off_and_never_comes_fails_in_its_time() -> None:
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"))
    add_in_two_orders(p, d)
    fabric.advance(0.1)
    p.step()
    fabric.deliver()
    run(fabric, d, seconds=2 * LOAD_TIMEOUT_S)  # P's engine hangs from now on
    assert d.ended == {"A": FinishReason.ERROR, "B": FinishReason.LENGTH}
    blocks = d.scheduler.kv_block_counts()
    assert blocks.free == blocks.total


def test_c39_a_cancel_in_mid_prefill_brings_the_blocks_home_at_once() -> None:
    """P stops computing the prompt, and requests that wait for its blocks get them."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0"), max_num_batched_tokens=16), Engine(fabric, fabric.add("d0"))
    hand_over("A", p, d)
    hand_over("B", p, d)
    for engine in (d, p, p):
        engine.step()
        fabric.deliver()
    d.scheduler.finish_requests(["A"], RequestStatus.FINISHED_ABORTED)
    d.step()
    fabric.deliver()
    plan = p.step()
    assert p.ended == {"A": FinishReason.ABORT}
    assert set(plan.num_scheduled_tokens) == {"B"}
    run(fabric, p, d)
    assert p.ended["B"] is FinishReason.HANDED_OVER
    assert p.worker.connector.counters()["kv_sends_cancelled"] == 1
    assert p.scheduler.kv_block_counts().free == NUM_USABLE


def test_c39_a_request_that_was_cancelled_before_the_prefill_worker_got_it_is_not_computed() -> None:
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0"), max_num_batched_tokens=16), Engine(fabric, fabric.add("d0"))
    d.add("A", TransferRole.CONSUMER, p)
    d.step()
    d.scheduler.finish_requests(["A"], RequestStatus.FINISHED_ABORTED)
    d.step()
    fabric.deliver()
    p.add("A", TransferRole.PRODUCER, d)
    plans = [p.step() for _ in range(8)]
    assert p.ended == {"A": FinishReason.ABORT}
    assert sum(plan.total_num_scheduled_tokens for plan in plans) == 16  # the step that carried the command
    assert p.scheduler.kv_block_counts().free == NUM_USABLE


def test_c39_an_unwanted_request_concerns_no_other() -> None:
    """The reports of unwanted requests may be late, doubled or unknown, or name requests that decode."""
    fabric = Fabric("shared_memory")
    p, d = Engine(fabric, fabric.add("p0")), Engine(fabric, fabric.add("d0"))
    hand_over("A", p, d)
    d.step()
    assert d.scheduler.update_connector_output(KVConnectorOutput(unwanted=("A", "A", "nobody"))) == {}
    run(fabric, p, d)
    assert_all_decoded(fabric, [p], [d], "A")
