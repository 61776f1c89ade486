"""Scenario: a seed's workers, requests, network and faults. Drawn once, then a value."""

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from baton.config import KVTransferConfig, SchedulerConfig
from baton.worker import WorkerRole
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.placement import Mode
from kv_transfer.protocol.transports import NIXL, SHARED_MEMORY, ZMQ_TCP
from simulator.gateway import RequestSpec
from simulator.model import BREAKS_STEPS, KILLS_WORKERS, prompt_of_long_answer, random_prompt
from simulator.network import NetworkFaults
from simulator.pools import ReadFaults
from simulator.worker import WorkerSpec
from tests.simulation.drafts import has_drafts, has_grammars, with_drafts, with_grammars
from tests.simulation.windows import has_windows, with_windows

MAX_MODEL_LEN = 48
PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")

CROWDED_EVERY = 8
"""One seed in so many is crowded."""

GREEDY_EVERY, GREEDY_SEED = 32, 6
"""In one seed in so many, from this one on, one caller takes all it can before others come."""
GREEDY, NEWCOMER, GREEDY_TOKENS = "greedy", "newcomer", 36

TWO_GATEWAYS_EVERY = 5

POISONED_EVERY = 16
NUM_POISONS = 6
POISON_EVERY_S = 1.5
"""So that each comes when the one before it has ended."""

FaultKind = Literal[
    "pause", "crash", "partition", "disconnect", "device", "reset", "break", "drain", "hang", "slow", "spoil"
]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    at: float
    worker: str
    peer: str
    duration_s: float
    is_mutual: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    transfer: KVTransferConfig
    policy: LoadFailurePolicy
    workers: tuple[WorkerSpec, ...]
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    network: NetworkFaults
    read_faults: ReadFaults
    calm_from: float
    """When faults stop; partitions, pauses and crashes are over by then."""
    is_crowded: bool = False
    """See `_crowded`: no fault and long timeouts, so that a request that waits long waits for ever."""
    is_greedy: bool = False
    """See `_greedy`."""
    num_gateways: int = 1
    gateway_dies_at: float | None = None
    """When the last gateway dies."""
    poison: int | None = None
    """See `_poisoned`: the first token of the request that comes again and again."""
    reports_exits: bool = True
    """The kernel notifies watchers of a process's end; else its pools stay open until they are idle."""

    @property
    def is_checked(self) -> bool:
        """Checksums are compared wherever bytes go, so that damage must be noticed."""
        has_one_host = len({worker.host for worker in self.workers}) == 1
        return self.transfer.checksum == "on" or (self.transfer.checksum == "auto" and not has_one_host)


def make_scenario(seed: int) -> Scenario:
    """One seed in five has two gateways. In half of these seeds, one of the two gateways dies during the run.

    In half of all seeds the kernel does not report exits. Both are drawn apart from the rest, so that seeds with one
    gateway do not depend on them.
    """
    reports_exits = random.Random(f"kernel of {seed}").random() < 0.5
    scenario = replace(_with_one_gateway(seed), reports_exits=reports_exits)
    if has_drafts(seed):
        workers, requests = with_drafts(seed, scenario.workers, scenario.requests, MAX_MODEL_LEN)
        scenario = replace(scenario, workers=workers, requests=requests)
    if has_grammars(seed):
        scenario = replace(scenario, requests=with_grammars(seed, scenario.requests))
    if has_windows(seed):
        workers, requests = with_windows(seed, scenario.workers, scenario.requests, MAX_MODEL_LEN)
        scenario = replace(scenario, workers=workers, requests=requests)
    is_apart = scenario.is_greedy or scenario.poison is not None
    if has_gray_faults(seed) and not is_apart:
        return replace(scenario, faults=scenario.faults + _gray_faults(seed))
    if seed % TWO_GATEWAYS_EVERY != 3 or scenario.is_greedy:
        return scenario
    rng = random.Random(f"gateways of {seed}")
    latest = max(spec.arrives_at for spec in scenario.requests) + 0.1
    dies_at = rng.uniform(0.0, latest) if rng.random() < 0.5 else None
    return replace(scenario, num_gateways=2, gateway_dies_at=dies_at)


def _with_one_gateway(seed: int) -> Scenario:
    """One seed in eight has no fault; in the others each kind of fault may be present.

    In tight seeds, long prompts crowd the prefill workers' small pools and preempt one another. In stale ones of
    these, consumers also read slowly and compare no checksums: the hardest case for the protocol.
    """
    rng = random.Random(seed)
    if seed % CROWDED_EVERY == 3:
        return _crowded(rng, seed)
    if seed % GREEDY_EVERY == GREEDY_SEED:
        return _greedy(rng, seed)
    if seed % POISONED_EVERY == 7:
        return _poisoned(rng, seed)
    is_quiet, is_tight = rng.random() < 0.125, rng.random() < 0.4
    is_stale = is_tight and rng.random() < 0.5
    duration_s = rng.choice([0.2, 1.0, 3.0])
    lease_s = rng.choice([0.25, 0.25, 2.0])
    transfer = KVTransferConfig(
        lease_s=lease_s,
        peer_timeout_s=lease_s * rng.choice([0.5, 0.5, 2.0]),
        load_timeout_s=rng.choice([1.0, 4.0]),
        checksum=rng.choice(["auto", "auto", "on", "off"]),
    )
    transports = rng.choice(
        [(ZMQ_TCP,), (SHARED_MEMORY, ZMQ_TCP), (SHARED_MEMORY, ZMQ_TCP), (NIXL, ZMQ_TCP), (NIXL,)]
    )
    if is_stale:
        transfer = transfer.model_copy(update={"checksum": "off"})
        transports = rng.choice([(SHARED_MEMORY, ZMQ_TCP), (NIXL, ZMQ_TCP)])
    has_one_host = rng.random() < 0.7
    workers = _workers(rng, transports, has_one_host, is_tight)
    return Scenario(
        seed,
        transfer,
        rng.choice(["recompute", "retry"] if is_stale else ["retry", "recompute", "fail"]),
        workers,
        _requests(rng, duration_s, is_tight),
        () if is_quiet else _faults(rng, duration_s, lease_s, is_stale),
        NetworkFaults() if is_quiet else _network_faults(rng, transfer, has_one_host),
        ReadFaults() if is_quiet else _read_faults(rng, lease_s, is_stale),
        duration_s,
    )


def _crowded(rng: random.Random, seed: int) -> Scenario:
    """Pools with room for little more than one prompt on both ends. The two ends have different orders of requests."""
    transports = rng.choice([(ZMQ_TCP,), (SHARED_MEMORY, ZMQ_TCP), (NIXL,)])
    workers = []
    for spec in _workers(rng, transports, has_one_host=True, is_tight=True):
        config = spec.scheduler
        tight = {
            "num_blocks": 2 + MAX_MODEL_LEN // config.block_size + rng.randrange(3),
            "max_num_seqs": rng.choice([1, 3, 8]),
            "max_num_batched_tokens": rng.choice([8, 8, 64]),
        }
        scheduler = SchedulerConfig(**{**config.model_dump(), **tight})
        workers.append(
            replace(spec, scheduler=scheduler, model="model", max_waiting=100, step_s=(0.001, 0.004))
        )
    requests = [
        replace(spec, mode=rng.choice([None, Mode.DISAGGREGATED]), timeout_s=None, leaves_after_s=None)
        for spec in _requests(rng, 0.1, is_tight=True)
    ]
    transfer = KVTransferConfig(lease_s=2.0, peer_timeout_s=1.0, load_timeout_s=60.0)
    quiet = NetworkFaults(), ReadFaults()
    return Scenario(seed, transfer, "fail", tuple(workers), tuple(requests), (), *quiet, 1.0, is_crowded=True)


def _greedy(rng: random.Random, seed: int) -> Scenario:
    """Long answers of one caller fill the decode workers' few slots, or their few blocks. Then other callers come. No
    answer ends early, since that would leave room for others, even if one caller could hold everything."""
    workers = []
    for spec in _workers(rng, (ZMQ_TCP,), has_one_host=True, is_tight=False):
        few = rng.choice([{"max_num_seqs": 8, "num_blocks": 400}, {"max_num_seqs": 64, "num_blocks": 100}])
        roomy = {"max_num_seqs": 64, "num_blocks": 1_000, "max_num_batched_tokens": 64}
        is_decode = spec.role is WorkerRole.DECODE
        values = {**spec.scheduler.model_dump(), **roomy, **(few if is_decode else {}), "policy": "fcfs"}
        step_s = (0.02, 0.05) if is_decode else (0.001, 0.004)
        scheduler = SchedulerConfig(**values)
        workers.append(replace(spec, scheduler=scheduler, model="model", max_waiting=100, step_s=step_s))
    plain = RequestSpec("", (), 0, 0.0, None, None, None, None, 0)
    requests = [
        replace(
            plain,
            request_id=f"g{number}",
            prompt=prompt_of_long_answer(rng, 8, 12, GREEDY_TOKENS),
            max_tokens=GREEDY_TOKENS,
            caller=GREEDY,
        )
        for number in range(60)
    ]
    requests += [
        replace(
            plain,
            request_id=f"n{number}",
            prompt=random_prompt(rng, [()], 8, 12),
            max_tokens=4,
            arrives_at=0.4 + 0.2 * number,
            caller=f"{NEWCOMER} {number % 2}",
        )
        for number in range(4)
    ]
    transfer = KVTransferConfig(lease_s=2.0, peer_timeout_s=1.0, load_timeout_s=60.0)
    quiet = NetworkFaults(), ReadFaults()
    return Scenario(seed, transfer, "fail", tuple(workers), tuple(requests), (), *quiet, 1.0, is_greedy=True)


def _poisoned(rng: random.Random, seed: int) -> Scenario:
    """The only fault is one caller's request, which breaks each step or ends each worker, and comes repeatedly."""
    workers = _workers(
        rng, rng.choice([(ZMQ_TCP,), (SHARED_MEMORY, ZMQ_TCP)]), has_one_host=True, is_tight=False
    )
    poison = rng.choice([BREAKS_STEPS, KILLS_WORKERS])
    bystanders = [
        replace(
            spec, request_id=f"{turn}-{spec.request_id}", arrives_at=spec.arrives_at + turn * POISON_EVERY_S
        )
        for turn in range(NUM_POISONS)
        for spec in _requests(rng, 0.1, is_tight=False)
    ]
    prompt = (poison, *(rng.randrange(1_000, 2_000) for _ in range(rng.randrange(30))))
    mode = rng.choice([None, Mode.LOCAL, Mode.DISAGGREGATED])
    requests = [
        *(replace(spec, timeout_s=None, leaves_after_s=None) for spec in bystanders),
        *(
            RequestSpec(
                f"poison{turn}", prompt, 9, turn * POISON_EVERY_S + 0.01, mode, None, None, None, 0, "mallory"
            )
            for turn in range(NUM_POISONS)
        ),
    ]
    return Scenario(
        seed,
        KVTransferConfig(lease_s=2.0, peer_timeout_s=1.0),
        rng.choice(["retry", "recompute"]),
        tuple(replace(spec, model="model", max_waiting=100, step_s=(0.001, 0.004)) for spec in workers),
        tuple(requests),
        (),
        NetworkFaults(),
        ReadFaults(),
        NUM_POISONS * POISON_EVERY_S,
        poison=poison,
    )


def _workers(
    rng: random.Random, transports: tuple[str, ...], has_one_host: bool, is_tight: bool
) -> tuple[WorkerSpec, ...]:
    block_sizes = rng.choice([(4, 4), (4, 4), (2, 4), (4, 2), (2, 8), (8, 4)])
    is_misfit_there = rng.random() < 0.03
    specs = []
    for name in PREFILL + DECODE:
        block_size = block_sizes[name in DECODE]
        specs.append(
            WorkerSpec(
                name,
                WorkerRole.DECODE if name in DECODE else WorkerRole.PREFILL,
                _scheduler(rng, block_size, is_tight, is_prefill=name in PREFILL),
                "host" if has_one_host else name,
                transports,
                rng.choice([2**26, 2**26, 100, 400]),
                "another model" if is_misfit_there and name == "p1" else "model",
                rng.choice([(0.001, 0.004), (0.001, 0.004), (0.01, 0.05)]),
                rng.choice([0.0, 0.0, 0.002]),
                rng.choice([100, 100, 2]),
                rng.choice([0.0, 1_000.0, 65_536.5]),
                rng.random() < 0.2,
            )
        )
    return tuple(specs)


def _scheduler(rng: random.Random, block_size: int, is_tight: bool, *, is_prefill: bool) -> SchedulerConfig:
    """A pool that holds one request of full length, and not many more."""
    preemption = rng.choice(["recompute", "recompute", "swap", "swap"])
    policy = rng.choice(["fcfs", "priority"])
    values: dict[str, Any] = {
        "num_blocks": 1 + rng.choice([1, 1, 2, 4]) * (MAX_MODEL_LEN // block_size) + rng.randrange(3),
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 3, 8]),
        "max_num_batched_tokens": rng.choice([3, 8, 64]),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": rng.random() < 0.75,
        "async_scheduling": rng.random() < 0.5,
        "policy": policy,
        "preemption": preemption,
        "num_swap_blocks": None if preemption == "recompute" else rng.choice([3, 12]),
        "long_prefill_token_threshold": rng.choice([0, 0, 4]),
    }
    if is_tight and not is_prefill and rng.random() < 0.3:  # room for every load at once
        values |= {"num_blocks": 2 + 4 * (MAX_MODEL_LEN // block_size), "max_num_seqs": 8}
    if is_tight and is_prefill:
        values |= {
            "num_blocks": 2 + MAX_MODEL_LEN // block_size,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8,
        }
    return SchedulerConfig(**values)


def _requests(rng: random.Random, duration_s: float, is_tight: bool) -> tuple[RequestSpec, ...]:
    stems: list[tuple[int, ...]] = [()]
    stems += [tuple(rng.randrange(1_000) for _ in range(rng.randrange(1, 20))) for _ in range(2)]
    spread_s = rng.choice([0.0, duration_s / 4, duration_s])
    num_requests = rng.randrange(5, 11) if is_tight else rng.randrange(2, 9)
    return tuple(
        RequestSpec(
            request_id=f"r{number}",
            prompt=random_prompt(rng, stems, 20 if is_tight else 1, 34),
            max_tokens=rng.choice([1, 3, 6, 10]),
            arrives_at=rng.uniform(0.0, spread_s),
            mode=rng.choice([None, None, None, None, Mode.DISAGGREGATED, Mode.LOCAL]),
            timeout_s=rng.choice([None, None, None, 0.25, 2.0]),
            leaves_after_s=rng.uniform(0.0, 0.3) if rng.random() < (0.4 if is_tight else 0.2) else None,
            cache_salt=rng.choice([None, None, "salt"]),
            priority=rng.randrange(2),
        )
        for number in range(num_requests)
    )


FAULT_KINDS: list[FaultKind] = ["pause", "pause", "crash", "partition", "partition", "disconnect"]
FAULT_KINDS += ["device", "reset", "break", "drain", "drain"]


def _faults(rng: random.Random, duration_s: float, lease_s: float, is_stale: bool) -> tuple[Fault, ...]:
    wanted = [kind for kind in FAULT_KINDS if rng.random() < 0.35]
    faults = [_fault(rng, kind, duration_s, lease_s) for kind in wanted]
    if is_stale:
        faults += [_fault(rng, rng.choice(["break", "break", "crash"]), 0.5, lease_s) for _ in range(4)]
    return tuple(faults)


def _fault(rng: random.Random, kind: FaultKind, duration_s: float, lease_s: float) -> Fault:
    worker = rng.choice(DECODE if kind == "break" else PREFILL + DECODE)
    longest_s = rng.choice([0.1, lease_s * 1.25, lease_s * 3])
    return Fault(
        kind,
        at=rng.uniform(0.0, min(duration_s, rng.choice([0.05, 0.2, 3.0]))),
        worker=worker,
        peer=rng.choice(PREFILL if worker in DECODE else DECODE),
        duration_s=int(rng.uniform(0.0, longest_s) * 1024) / 1024,
        is_mutual=rng.random() < 0.5,
    )


def has_gray_faults(seed: int) -> bool:
    """One seed in eight, of those with one gateway that are not crowded."""
    return seed % CROWDED_EVERY == 6 and seed % TWO_GATEWAYS_EVERY != 3


def _gray_faults(seed: int) -> tuple[Fault, ...]:
    """Workers that answer, but compute nothing, or slowly, or no finite values. Drawn apart from the rest."""
    rng, kinds = random.Random(f"gray faults of {seed}"), list[FaultKind](["hang", "slow", "spoil"])
    return tuple(_fault(rng, rng.choice(kinds), 0.5, 1.0) for _ in range(rng.randrange(1, 4)))


def _network_faults(rng: random.Random, transfer: KVTransferConfig, has_one_host: bool) -> NetworkFaults:
    """Bytes are damaged only where checksums are promised: always, or between hosts."""
    is_checked = transfer.checksum == "on" or (transfer.checksum == "auto" and not has_one_host)
    some = partial(_some, rng)
    return NetworkFaults(
        loss=some(0.2),
        doubling=some(0.2),
        header_damage=some(0.1),
        payload_damage=some(0.3) if is_checked else 0.0,
        lateness=some(0.2),
        max_lateness_s=rng.choice([0.02, 0.5, transfer.lease_s * 1.5]),
        is_ordered=rng.random() < 0.4,
        max_delay_s=rng.choice([0.0005, 0.004, 0.02]),
    )


def _read_faults(rng: random.Random, lease_s: float, is_stale: bool) -> ReadFaults:
    some = partial(_some, rng)
    return ReadFaults(
        failure=rng.choice([0.0, 0.02]) if is_stale else some(0.1),
        hang=some(0.05),
        damage=some(0.2),
        refusal=some(0.3),
        max_duration_s=rng.choice([0.0005, 0.01, 0.05]),
        slowness=0.6 if is_stale else some(0.6),
        max_slow_s=rng.choice([lease_s / 4, lease_s, lease_s * 3]),
    )


def _some(rng: random.Random, highest: float) -> float:
    """A fault's likelihood: none in half of all seeds."""
    return rng.choice([0.0, 0.0, highest / 4, highest])
