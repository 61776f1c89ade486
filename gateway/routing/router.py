"""Router: chooses the workers of each request; pure logic, so that a simulator can run it too.

The router gets the workers' reports (`on_status`, `on_worker_lost`, `on_kv_events`), the gateway's actions
(`sent`, `ended`) and measurements (`measured`). `route` returns a placement. The router has no clock: all its
times are durations that workers reported.
"""

from collections.abc import Collection, Iterator
from hashlib import blake2b

from baton.block_hash import extend_block_hashes
from baton.config import GatewayConfig, SchedulerConfig
from baton.errors import RequestError
from baton.messages.request_plane import KVEvents
from baton.request import StageTimes
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.cost import DEFAULT_SCHEDULER, EXPECTED_NEW_TOKENS, CostModel, Need
from gateway.routing.placement import (
    AwaitsPrompts,
    BlockHashes,
    Mode,
    NoDecodeWorker,
    NoPrefillWorker,
    NoRoom,
    NoSlot,
    Placement,
    RouteQuery,
)
from gateway.routing.policies import Chosen, KVAware, LeastLoaded, Policy, RoundRobin
from gateway.routing.prefix_index import PrefixIndex, short_keys
from gateway.routing.worker_estimate import WorkerEstimate

HASHED_AT_ONCE = 1024
"""How many blocks are hashed in one portion, which takes about a millisecond."""


class Router:
    """Places requests according to the gateway's configuration. Workers hash prefixes with `hash_key`, and
    plan their steps according to `scheduler`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        hash_key: bytes,
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    ) -> None:
        self._config = config
        self._hash_key = hash_key
        self._costs = CostModel(scheduler)
        self._policy = _make_policy(config, self._costs)
        self._default_mode = _default_mode(config)
        self._follows_kv = config.routing_policy == "kv_aware" or self._default_mode is None
        """Whether any decision depends on the content of prefix caches."""
        self._index = PrefixIndex()
        self._workers: dict[str, WorkerEstimate] = {}
        self._able: dict[WorkerRole, list[WorkerEstimate]] = {role: [] for role in WorkerRole}
        """Workers that accept requests, by role; each list is sorted by name."""
        self._block_sizes: set[int] = set()
        """Block sizes of the workers in `_able`."""
        self._turn = 0
        """How many placements `route` has returned for requests without an affinity key."""

    @property
    def worker_names(self) -> Collection[str]:
        """All workers that have reported, except lost ones whose sub-requests have ended."""
        return self._workers.keys()

    @property
    def num_sub_requests(self) -> dict[str, int]:
        """Running prefill and decode requests, by worker."""
        return {name: len(worker.sub_requests) for name, worker in self._workers.items()}

    def ready_worker(self, name: str) -> WorkerEstimate | None:
        """The worker of this name, if it accepts requests at present."""
        worker = self._workers.get(name)
        return None if worker is None or worker.service is None else worker

    def num_ready(self, role: WorkerRole) -> int:
        return len(self._able[role])

    def role_of(self, name: str) -> WorkerRole | None:
        """The role that the worker reported last; None if it is lost or unknown."""
        worker = self._workers.get(name)
        return None if worker is None or worker.is_gone else worker.status.role

    def is_draining(self, name: str) -> bool:
        """Whether the worker reported that it drains, in order to end or to change its role."""
        worker = self._workers.get(name)
        return worker is not None and not worker.is_gone and worker.status.state is WorkerState.DRAINING

    def busy_with_suspects(self) -> frozenset[str]:
        """Workers on which a suspect has its turn."""
        workers = ((name, self.ready_worker(name)) for name in self._workers)
        return frozenset(name for name, worker in workers if worker and not worker.status.takes_suspects)

    def estimate(self, worker: str) -> WorkerEstimate:
        """The estimate of a worker that has reported."""
        return self._workers[worker]

    def prompt_s(self, worker: str, num_tokens: int) -> float:
        """About how long a worker needs to compute `num_tokens` prompt tokens."""
        return self._costs.prompt_s(self._workers[worker], num_tokens)

    def on_status(self, status: WorkerStatus) -> None:
        """Applies a worker's status. A ready worker gets requests of its role, which may have changed."""
        name = status.ref.name
        worker = self._workers.setdefault(name, WorkerEstimate(name))
        before = worker.service, worker.block_size
        if worker.is_new_incarnation(status):
            self._index.forget(name)
        worker.on_status(status)
        self._costs.on_status(status)
        if (worker.service, worker.block_size) != before:
            self._list_able_workers()

    def on_worker_lost(self, name: str) -> None:
        """The worker is lost, silent or removed. It gets no requests until its next status. Unknown names are
        ignored.
        """
        self._index.forget(name)
        if worker := self._workers.get(name):
            worker.is_gone = True
            self._list_able_workers()
            self._drop_if_gone(worker)

    def on_kv_events(self, worker: str, events: KVEvents) -> bool:
        """Applies changes of a worker's prefix cache. Returns False if earlier changes are missing."""
        return self._index.apply(worker, events)

    def lacks_kv_listing(self, worker: str) -> bool:
        """Whether the listing of a worker's cached blocks is still missing. The driver asks this at each heartbeat, and
        subscribes to the worker's KV events if the listing is missing. False for all workers if no decision depends on
        KV events.
        """
        return self._follows_kv and worker in self._workers and not self._index.is_known(worker)

    def sent(self, worker: str, placement: Placement) -> None:
        """A sub-request of the placement was sent to this worker. It counts at once, before the worker
        reports it."""
        self._workers[worker].sent(placement)

    def ended(self, worker: str, placement: Placement) -> None:
        """A sub-request that was `sent` has ended, in any way. Call this once for each sub-request."""
        estimate = self._workers[worker]
        estimate.ended(placement, are_hits_known=self._follows_kv)
        self._drop_if_gone(estimate)

    def measured(self, placement: Placement, times: StageTimes) -> None:
        """Learns from the times of a placement's finished decode request."""
        if placement.prefill is not None and times.transfer_bytes:
            self._costs.links.measured(
                placement.prefill,
                placement.decode,
                placement.num_transfer_tokens,
                times.transfer_bytes,
                times.transfer_moving_s,
            )

    def hashing(
        self, token_ids: tuple[int, ...], cache_salt: str | None, hashes: BlockHashes
    ) -> Iterator[None]:
        """Adds the hashes that `route` will need. Yields after each portion of about a millisecond."""
        if self._follows_kv:
            yield from self._hash(token_ids, cache_salt, hashes)

    def route(self, query: RouteQuery) -> Placement:
        """Returns a placement without excluded workers. It counts only after `sent` was called for it.

        Raises NoRoom if all decode workers are full, and the query's own refusal if it refuses every decode
        worker with room. Raises WorkerUnavailable if there is no decode worker, or no prefill worker for a
        request that requires one.
        """
        placement = self._allowed(query)
        if query.affinity_key is None:
            # The turn moves on even if the placement is not sent, as when too many prompts wait at its worker: the next
            # try takes another worker.
            self._turn += 1
        return placement

    def num_tokens_to_compute(self, query: RouteQuery) -> dict[str, int]:
        """For each worker that may compute the prompt, how many of the query's tokens are not in its prefix
        cache. Empty if the router does not follow prefix caches, since no decision depends on them."""
        if not self._follows_kv:
            return {}
        prefills, decodes = self._able[WorkerRole.PREFILL], self._able[WorkerRole.DECODE]
        match query.mode or self._default_mode:
            case Mode.LOCAL:
                computing = decodes
            case Mode.DISAGGREGATED:
                computing = prefills or decodes
            case None:
                computing = prefills + decodes
        hits = self._hits(query)
        return {worker.name: len(query.token_ids) - hits.get(worker.name, 0) for worker in computing}

    def _allowed(self, query: RouteQuery) -> Placement:
        """The best placement whose decode worker the query does not refuse."""
        able = self._candidates(WorkerRole.DECODE, query)
        if not able:
            raise NoDecodeWorker("no decode worker is available")
        prefills = [] if query.without_prefill else self._candidates(WorkerRole.PREFILL, query)
        mode = query.mode or self._default_mode
        if mode is not Mode.LOCAL and not prefills and self._requires_prefill(query):
            raise NoPrefillWorker("no prefill worker is available, but the request requires one")
        num_tokens = len(query.token_ids)
        if not (decodes := _with_room(able, num_tokens + 1)):
            raise _no_room(able, num_tokens)
        num_new_tokens = min(query.max_new_tokens, EXPECTED_NEW_TOKENS)
        _raise_if_all_refused(query, decodes)
        need = Need(num_tokens, num_new_tokens, self._hits(query) if self._follows_kv else {})
        placement = self._place(query, mode, need, prefills, decodes)
        if query.refusal_at(placement.decode) is None:
            return placement
        decodes = [worker for worker in decodes if query.refusal_at(worker.name) is None]
        return self._place(query, mode, need, prefills, decodes)

    def _place(
        self,
        query: RouteQuery,
        mode: Mode | None,
        need: Need,
        prefills: list[WorkerEstimate],
        decodes: list[WorkerEstimate],
    ) -> Placement:
        if mode is Mode.LOCAL:
            reason = "asked for" if query.mode is Mode.LOCAL else "configured"
            return self._local(need, self._policy.local(need, decodes), reason)
        if mode is None:
            local, threshold = self._policy.local(need, decodes), self._config.local_prefill_tokens
            if threshold is not None and need.num_missing(local.name) <= threshold:
                return self._local(need, local, "short prompt")
        pair = self._policy.pair(need, prefills, decodes, query.avoided)
        if mode is None and pair is not None and (reason := self._reason_for_local(need, local, pair)):
            return self._local(need, local, reason)
        if pair is None and self._requires_prefill(query):
            pair = self._policy.pair(need, prefills, decodes, frozenset())
        if pair is None:
            reason = "no link to a prefill worker" if prefills else "no prefill worker"
            return self._local(need, self._policy.local(need, decodes), reason, is_fallback=True)
        return self._pair(need, *pair)

    def _requires_prefill(self, query: RouteQuery) -> bool:
        return query.mode is Mode.DISAGGREGATED or self._config.require_disaggregated

    def _reason_for_local(self, need: Need, local: WorkerEstimate, pair: Chosen) -> str:
        """Why a request that requires no mode should use this decode worker alone; empty if it should not."""
        costs, threshold = self._costs, self._config.local_prefill_tokens
        wait_s = costs.wait_s(pair[0])
        idle_pair_s, local_s = costs.pair_s(*pair, need) - wait_s, costs.local_s(local, need, load_s=wait_s)
        if threshold is None and local_s <= idle_pair_s:
            if local.num_requests:
                return "short prompt"
            if need.num_missing(local.name) <= local.step_tokens:  # later requests wait for at most one step
                return "idle decode worker"
        order_s = costs.order_s(pair[0], need)
        return "busy prefill workers" if order_s > 0.0 and local_s <= idle_pair_s + order_s else ""

    def _local(self, need: Need, decode: WorkerEstimate, reason: str, is_fallback: bool = False) -> Placement:
        return Placement(
            Mode.LOCAL,
            None,
            decode.name,
            is_fallback,
            reason,
            num_prefill_tokens=need.num_missing(decode.name),
            num_decode_blocks=decode.num_blocks_for(need.num_tokens + 1),
        )

    def _pair(self, need: Need, prefill: WorkerEstimate, decode: WorkerEstimate) -> Placement:
        return Placement(
            Mode.DISAGGREGATED,
            prefill.name,
            decode.name,
            num_prefill_tokens=need.num_missing(prefill.name),
            num_transfer_tokens=need.num_missing(decode.name),
            num_decode_blocks=decode.num_blocks_for(need.num_tokens + 1),
        )

    def _hits(self, query: RouteQuery) -> dict[str, int]:
        """How many of the query's tokens each worker reads from its cache. This is never the last token,
        which must be computed in any case."""
        hits: dict[str, int] = {}
        hashes = {} if query.block_hashes is None else query.block_hashes
        if not query.skip_reading_prefix_cache:
            for _ in self._hash(query.token_ids, query.cache_salt, hashes):
                pass
        for size, of_size in hashes.items():
            keys = short_keys(of_size[: (len(query.token_ids) - 1) // size])
            for name, num_blocks in self._index.lookup(keys).items():
                hits[name] = num_blocks * size
        return hits

    def _hash(
        self, token_ids: tuple[int, ...], cache_salt: str | None, hashes: BlockHashes
    ) -> Iterator[None]:
        """Adds the missing hashes portion by portion, up to the first portion that ends with a block that no
        worker has."""
        for size in tuple(self._block_sizes):  # a copy, since the set may change between portions
            of_size = hashes.setdefault(size, [])
            num_blocks = (len(token_ids) - 1) // size
            while len(of_size) < num_blocks and self._may_go_on(of_size):
                end = min(num_blocks, len(of_size) + HASHED_AT_ONCE)
                extend_block_hashes(of_size, token_ids, size, self._hash_key, cache_salt, end)
                yield

    def _may_go_on(self, hashes: list[bytes]) -> bool:
        """Whether a worker may have the blocks that follow these."""
        return not hashes or bool(self._index.lookup(short_keys(hashes[-1:])))

    def _candidates(self, role: WorkerRole, query: RouteQuery) -> list[WorkerEstimate]:
        """Workers of a role that may get the request, in the order of the affinity key or, without a key, beginning
        with the next worker in turn.

        If the request needs such a worker, but none has a pool that can ever hold the request, it may get any of them.
        That worker refuses it at once, and says why.
        """
        able, num_tokens = self._able[role], len(query.token_ids) + 1
        large = [worker for worker in able if worker.may_ever_hold(num_tokens)]
        if large or (role is WorkerRole.PREFILL and not self._requires_prefill(query)):
            able = large
        if query.excluded:
            able = [worker for worker in able if worker.name not in query.excluded]
        if query.affinity_key is not None:
            return _by_affinity(able, query.affinity_key)
        start = self._turn % len(able) if able else 0
        return able[start:] + able[:start]

    def _list_able_workers(self) -> None:
        for role in WorkerRole:
            able = [worker for worker in self._workers.values() if worker.service is role]
            self._able[role] = sorted(able, key=lambda worker: worker.name)
        self._block_sizes = {worker.block_size for workers in self._able.values() for worker in workers}

    def _drop_if_gone(self, worker: WorkerEstimate) -> None:
        """Drops a lost worker once its requests have ended."""
        if worker.is_gone and not worker.sub_requests:
            del self._workers[worker.name]
            self._costs.links.forget(worker.name)


def _raise_if_all_refused(query: RouteQuery, decodes: list[WorkerEstimate]) -> None:
    """Raises the query's first refusal if it refuses all decode workers. Call this before costs are computed, since
    computing costs takes longer."""
    first: RequestError | None = None
    for worker in decodes:
        if (refusal := query.refusal_at(worker.name)) is None:
            return
        first = first or refusal
    if first is not None:
        raise first


def _by_affinity(workers: list[WorkerEstimate], key: str) -> list[WorkerEstimate]:
    """The workers in an order that depends on the key: rendezvous hashing (Thaler and Ravishankar, 1998). If
    a worker is added or removed, the order of the other workers does not change."""
    secret = blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()
    return sorted(
        workers, key=lambda worker: blake2b(worker.name.encode(), key=secret, digest_size=8).digest()
    )


def _default_mode(config: GatewayConfig) -> Mode | None:
    """The mode of requests that require no mode. None: the mode that costs less."""
    if config.routing_mode != "auto":
        return Mode(config.routing_mode)
    return Mode.DISAGGREGATED if config.require_disaggregated else None


def _with_room(decodes: list[WorkerEstimate], num_tokens: int) -> list[WorkerEstimate]:
    """Workers with a slot and enough free blocks. If there are none, workers without requests of this gateway. If no
    worker can ever hold this many tokens, all workers.

    By the second rule, each gateway may have one request in a worker's own queue, whose order is fair. Without this
    rule, a gateway that learns of free room later than other gateways would never get room. A worker that never frees
    some of its blocks would never get a request again.
    """
    if decodes and not decodes[0].may_ever_hold(num_tokens):
        return decodes
    fitting = [worker for worker in decodes if worker.has_slot and worker.has_blocks_for(num_tokens)]
    return fitting or [worker for worker in decodes if not worker.sub_requests]


def _no_room(decodes: list[WorkerEstimate], num_tokens: int) -> NoRoom:
    without_slot = [worker for worker in decodes if worker.has_blocks_for(num_tokens + 1)]
    if not without_slot:
        return NoRoom(f"no decode worker has free blocks for {num_tokens} tokens at present")
    if all(worker.awaits_prompts for worker in without_slot):
        return AwaitsPrompts("no decode worker has a slot until prefill workers have computed more prompts")
    return NoSlot("no decode worker has a slot at present")


def _make_policy(config: GatewayConfig, costs: CostModel) -> Policy:
    match config.routing_policy:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "kv_aware":
            return KVAware(costs)
