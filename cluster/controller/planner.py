"""Planner: decides how the number and the roles of workers change, and why; pure, and reads no clock.

Each call makes one decision with at most one change, so that the next call can observe its effect:

  no recent report?       ->  nothing
  outside the bounds?     ->  back into them
  a role is short?        ->  a worker of the other role if one is spare there, else a new one
  a role has one to spare ->  one fewer, unless the other role may soon take it
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import ceil

from baton.config import AutoscalingConfig
from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.load_signals import TTFT, percent, seconds, signals, signals_of_fewer
from cluster.controller.observation import CHANGING, COMING, Observation, ObservedWorker
from cluster.controller.role_watch import RoleWatch, Shortage, held_since

FAR_OFF = 2.0
"""A role that misses its target by this factor grows by half instead of by one worker."""

BUSY = 0.5
"""If the utilization of prefill workers is below this, prompts do not wait for prefill workers."""

Bounds = dict[WorkerRole, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """The new number of workers of this role."""

    role: WorkerRole
    count: int


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The new role of this worker."""

    worker: str
    role: WorkerRole
    replaces_unplaced: bool = False
    """The worker takes the place of a replica of this role for which no node has room."""


class NoChange(Enum):
    """Why nothing changes."""

    NO_REPORT = "no_report"
    """No gateway has reported recently."""
    STEADY = "steady"
    """No role is short, and none loses a worker now."""
    NOT_YET = "not_yet"
    """A target is missed, but not yet for `grow_after_s`."""
    CHANGING = "changing"
    """A worker of the role starts, or is about to."""
    COOLING = "cooling"
    """The effect of the role's last change is awaited."""
    FALLING = "falling"
    """The value that misses its target already falls."""
    NO_HELP = "no_help"
    """More workers of the role would not help."""
    AT_MAX = "at_max"
    """The role already has its maximum of workers. Workers that are leaving count, too."""


_MAY_TAKE_A_WORKER = (NoChange.NOT_YET, NoChange.CHANGING, NoChange.COOLING, NoChange.FALLING)
"""In these cases, a role that is short gets no further worker yet, but may soon take a worker of the other role."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`sentence` says what is decided, and why. Either `change` or `no_change` is set."""

    sentence: str
    change: ScaleDecision | RoleChange | None = None
    no_change: NoChange | None = None
    role: WorkerRole | None = None
    """The role that the decision is about."""


@dataclass(slots=True)
class _Role:
    """One role in the latest observation."""

    role: WorkerRole
    low: int
    high: int
    watch: RoleWatch
    staying: list[ObservedWorker] = field(default_factory=list)
    leaving: list[ObservedWorker] = field(default_factory=list)
    changed_at: float = float("-inf")
    """When a change was last begun, or a starting or restarting worker was last seen."""
    seen_leaving_at: float = float("-inf")
    """When a worker was last seen leaving."""
    decided_at: float = float("-inf")
    """When the planner last decided a change."""
    is_replacing: bool = False
    """A worker changes to this role, and then takes the place of a replica that no node has room for. Until then, both
    count."""
    unplaced_since: float | None = None
    """Since when some replica has waited for a node with room."""
    bounded_to: int | None = None
    """While `count` is outside of the bounds: the number of workers that would be within them. Otherwise None."""
    incomplete_since: float | None = None
    """Since when some replica has no serving worker."""

    @property
    def name(self) -> str:
        return self.role.value

    @property
    def count(self) -> int:
        """The number of replicas, including those of dead workers, which restart and count towards `high`."""
        return len(self.staying)

    @property
    def most(self) -> int:
        """The most workers that may stay now: a leaving worker counts towards `high` until it has ended."""
        return self.high - len(self.leaving)

    @property
    def settled_at(self) -> float:
        """When the last change was over. A removal is over when the worker has ended."""
        return max(self.changed_at, self.seen_leaving_at)

    @property
    def serving(self) -> list[ObservedWorker]:
        return [worker for worker in self.staying if worker.replica.state is ReplicaState.SERVING]

    @property
    def changing(self) -> list[ObservedWorker]:
        return [worker for worker in self.staying if worker.replica.state in CHANGING]

    def see(self, observation: Observation, now: float) -> None:
        workers = observation.of(self.role)
        self.staying = [worker for worker in workers if not worker.is_leaving]
        self.leaving = [worker for worker in workers if worker.is_leaving]
        if self.changing:
            self.changed_at = now
        if self.leaving:
            self.seen_leaving_at = now
        states = [worker.replica.state for worker in self.staying]
        self.is_replacing = self.is_replacing and ReplicaState.STARTING in states
        self.unplaced_since = held_since(self.unplaced_since, ReplicaState.PLACING in states, now)
        self.incomplete_since = held_since(
            self.incomplete_since, any(state is not ReplicaState.SERVING for state in states), now
        )


class Planner:
    """Gets observations at a fixed pace. Remembers the recent work of each role, its own latest changes, and for how
    long conditions have lasted."""

    def __init__(self, config: AutoscalingConfig, bounds: Bounds, may_change_roles: bool) -> None:
        """`bounds`: the fewest and the most workers of each role."""
        self._config = config
        self._may_change_roles = may_change_roles
        self._may_have_prefill = bounds[WorkerRole.PREFILL][1] > 0
        self._roles = [_Role(role, *bounds[role], RoleWatch(config, role)) for role in WorkerRole]
        self._refused_at = float("-inf")

    def observe(self, observation: Observation | None, now: float) -> Decision:
        """The decision now. `observation` None: no gateway has reported recently."""
        if observation is None:
            for role in self._roles:
                role.watch.report_missing()
            return Decision("nothing changes: no gateway has reported recently", no_change=NoChange.NO_REPORT)
        for role in self._roles:
            role.see(observation, now)
            inputs = self._config, observation, role.role, self._may_have_prefill
            role.watch.note(observation, signals(*inputs), now, signals_of_fewer(*inputs))
        decision = next(self._decisions(now), None) or self._steady()
        if isinstance(decision.change, RoleChange):
            self._note_change(self._roles, now)
            for role in self._roles:
                role.is_replacing = decision.change.replaces_unplaced and role.role is decision.role
        elif decision.change is not None:
            self._note_change([role for role in self._roles if role.role is decision.role], now)
        return decision

    def refused(self, change: ScaleDecision | RoleChange, now: float) -> None:
        """Records that the change failed. After a failed change of role, no other one is tried for a while."""
        if isinstance(change, RoleChange):
            self._refused_at = now

    def _note_change(self, roles: list[_Role], now: float) -> None:
        for role in roles:
            role.changed_at = role.decided_at = now

    def _decisions(self, now: float) -> Iterator[Decision]:
        """All decisions for which there is cause, the most urgent first."""
        for role in self._roles:
            yield from self._back_into_bounds(role)
        shortages = [(role, role.watch.shortage) for role in self._roles]
        waiting = []
        for role, shortage in sorted(shortages, key=lambda pair: -pair[1].worst.ratio if pair[1] else 0.0):
            if shortage is None:
                continue
            decision = self._relieve(role, shortage, now)
            if decision.change is not None:
                yield decision
            waiting.append(decision)
        for role in self._roles:
            may_be_taken = self._may_change_roles and any(
                decision.role is not role.role and decision.no_change in _MAY_TAKE_A_WORKER
                for decision in waiting
            )
            yield from self._shrink(role, now, may_be_taken)
        yield from waiting

    def _back_into_bounds(self, role: _Role) -> Iterator[Decision]:
        """The decision to return into the bounds. In a dry run, it is made only once: no change follows it, and it must
        not hide other decisions."""
        is_above = role.count > role.high + role.is_replacing
        count = role.high if is_above else max(role.count, min(role.low, role.most))
        was_said = self._config.mode == "dry_run" and role.bounded_to == count
        role.bounded_to = None if count == role.count else count
        if count == role.count or was_said:
            return
        bound = f"above the maximum of {role.high}" if is_above else f"below the minimum of {role.low}"
        yield _scale(role, count, f"{role.count} is {bound}")

    def _relieve(self, role: _Role, shortage: Shortage, now: float) -> Decision:
        """The change that helps a role that misses a target, or the reason why nothing changes."""
        if shortage.lasted_s < self._config.grow_after_s:
            until = f"only for {seconds(shortage.lasted_s)} of the {seconds(self._config.grow_after_s)} before a change"
            return _nothing(role, NoChange.NOT_YET, f"{shortage.worst}, but {until}")
        why = f"{shortage.worst} for {seconds(shortage.lasted_s)}"
        if (no_help := self._no_help(role, shortage)) is not None:
            return _nothing(role, NoChange.NO_HELP, f"{why}, but {no_help}")
        change = self._change_role(role, why, now)
        if change is not None:
            return change
        if role.changing:
            return _nothing(role, NoChange.CHANGING, f"{why}, but {_what_changes(role)}")
        cooling_s = role.changed_at + self._config.grow_cooldown_s - now
        if cooling_s > 0.0:
            until = f"the effect of its last change is awaited for {seconds(cooling_s)} more"
            return _nothing(role, NoChange.COOLING, f"{why}, but {until}")
        role.watch.remember_overload(len(role.serving))
        if (before := role.watch.falls_from()) is not None:
            return _nothing(
                role, NoChange.FALLING, f"{why}, but this value falls: it was {shortage.worst.show(before)}"
            )
        if role.count >= role.most:
            return _nothing(role, NoChange.AT_MAX, f"{why}, but {_at_max(role)}")
        step = ceil(role.count / 2) if shortage.worst.ratio >= FAR_OFF else 1
        return _scale(role, min(role.count + max(1, step), role.most), why)

    def _no_help(self, role: _Role, shortage: Shortage) -> str | None:
        """Why more workers would not help, or None. Prefill workers that are mostly idle need no help."""
        utilization = role.watch.utilization(len(role.serving))
        if role.role is WorkerRole.DECODE or shortage.worst.what != TTFT or utilization >= BUSY:
            return None
        return f"prefill workers are only {percent(utilization)} busy, so more prefill workers would not help"

    def _change_role(self, short: _Role, why: str, now: float) -> Decision | None:
        """Gives this role a spare worker of the other role, which is faster and cheaper than a new worker."""
        config, other = self._config, next(role for role in self._roles if role is not short)
        has_waited = now - max(other.settled_at, self._refused_at) >= config.grow_cooldown_s
        if not self._may_change_roles or not has_waited or other.changing or other.leaving:
            return None
        if len(other.serving) <= other.low or other.count <= other.low:
            return None
        lacks_room = self._lacks_room(short, now)
        is_settled = not short.changing and now - short.changed_at >= config.grow_cooldown_s
        # Without room for a new worker, the spare worker takes the place of the replica that waits for room.
        count = short.count if lacks_room else short.count + 1
        if not (is_settled or lacks_room) or count > short.most:
            return None
        load = other.watch.fewer_suffice(len(other.serving) - 1, config.grow_after_s)
        if load is None:
            return None
        short.watch.remember_overload(len(short.serving))
        worker = min(
            other.serving, key=lambda worker: (worker.num_requests, worker.replica.name)
        ).replica.name
        room = ", no node has room for a new worker" if lacks_room else ""
        counts = f"{other.name} {other.count} -> {other.count - 1}, {short.name} {short.count} -> "
        sentence = f"{worker} {other.name} -> {short.name} ({counts}{count}): {why}{room}, and {load}"
        return Decision(sentence, RoleChange(worker, short.role, lacks_room), role=short.role)

    def _lacks_room(self, role: _Role, now: float) -> bool:
        """Whether a worker of this role has waited for room so long that more waiting is useless."""
        since = role.unplaced_since
        only_placing = all(worker.replica.state is ReplicaState.PLACING for worker in role.changing)
        return since is not None and only_placing and now - since >= self._config.grow_cooldown_s

    def _shrink(self, role: _Role, now: float, may_be_taken: bool) -> Iterator[Decision]:
        """The decision to remove a worker of this role, if one is spare. `may_be_taken`: the other role may soon take a
        spare worker of this role, so such a worker stays."""
        config = self._config
        has_cooled = now - role.decided_at >= config.shrink_cooldown_s
        if (
            role.leaving
            or role.count <= role.low
            or role.watch.calm_for() < config.shrink_after_s
            or not has_cooled
        ):
            return
        duration = seconds(role.watch.calm_for())
        since = role.incomplete_since
        if since is not None:
            # A replica without a serving worker is removed first: the targets were met without it.
            is_stuck = now - since >= max(config.shrink_cooldown_s, config.shrink_after_s)
            absent = next(w.replica for w in role.staying if w.replica.state is not ReplicaState.SERVING)
            if is_stuck and absent.state is not ReplicaState.DRAINING:
                why = f"all its targets were met for {duration} without {absent.name} ({absent.state.value})"
                yield _scale(role, role.count - 1, why)
            return
        if may_be_taken or now - role.settled_at < config.shrink_cooldown_s:
            return
        load = role.watch.fewer_suffice(role.count - 1, config.shrink_after_s)
        if load is not None:
            why = f"all its targets were met with room to spare for {duration}, and {load}"
            yield _scale(role, role.count - 1, why)

    def _steady(self) -> Decision:
        counts = " and ".join(f"{role.count} {role.name}" for role in self._roles)
        worst = [role.watch.worst for role in self._roles]
        nearest = max((signal for signal in worst if signal), key=lambda signal: signal.ratio, default=None)
        why = f"; the nearest to its target: {nearest}" if nearest and nearest.value > 0.0 else ""
        return Decision(f"nothing changes: {counts} are enough{why}", no_change=NoChange.STEADY)


def _scale(role: _Role, count: int, why: str) -> Decision:
    sentence = f"{role.name} {count - role.count:+d} ({role.count} -> {count}): {why}"
    return Decision(sentence, ScaleDecision(role.role, count), role=role.role)


def _nothing(role: _Role, no_change: NoChange, why: str) -> Decision:
    return Decision(f"{role.name} stays {role.count}: {why}", no_change=no_change, role=role.role)


def _what_changes(role: _Role) -> str:
    workers = [f"{w.replica.name} is {w.replica.state.value}" for w in role.changing]
    return ", ".join(workers)


def _at_max(role: _Role) -> str:
    not_serving = [
        worker.replica.name
        for worker in (*role.staying, *role.leaving)
        if worker.replica.state not in COMING | {ReplicaState.SERVING}
    ]
    if not not_serving:
        return f"{role.high} is the maximum"
    *others, last = not_serving
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"{role.high} is the maximum, of which {names} not serving"
