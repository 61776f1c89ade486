"""Leases: checks that a lease ends only if its reader was silent while the producer ran.

It keeps its own record of each reader's last sign of life.
"""

from baton.errors import WireError
from baton.kv import KVTransferParams
from kv_transfer.protocol.messages import TO_PRODUCER, Hold, Open
from kv_transfer.transport.base import Arrival
from simulator.world import Process, Violation, World

LEAST = 0.5
"""The least share of a lease that must pass before it may end. A standstill uses up a quarter of the lease, and there
are at most two standstills."""


class Leases:
    """The leases of one incarnation. Counts fewer signs of life than the producer does, so that no silence is measured
    too short."""

    def __init__(self, world: World, process: Process, lease_s: float) -> None:
        self._world = world
        self._process = process
        self._lease_s = lease_s
        self._last_sign_at: dict[tuple[str, int], float] = {}
        """By hand-over: when its consumer last gave a sign of life, or when the lease began. The clock of these times
        stands still while the worker is stopped."""

    def begin(self, transfer: KVTransferParams) -> None:
        self._last_sign_at[transfer.transfer_id, transfer.attempt] = self._running()

    def on_arrival(self, arrival: Arrival) -> None:
        if arrival.is_from_producer:
            return
        try:
            message = TO_PRODUCER.decode(arrival.header)
        except WireError:
            return
        key = message.key
        is_for_us = key.producer == self._process.incarnation
        if (
            (key.transfer_id, key.attempt) in self._last_sign_at
            and is_for_us
            and isinstance(message, Hold | Open)
        ):
            self._last_sign_at[key.transfer_id, key.attempt] = self._running()

    def check(self, num_expired: int, freed: list[KVTransferParams]) -> None:
        """Both arguments are about the time since the last check. `num_expired`: leases that ended because of silence.
        `freed`: all hand-overs that have ended."""
        now = self._running()
        signs_at = [self._last_sign_at.pop((each.transfer_id, each.attempt), now) for each in freed]
        num_silent = sum(now - when >= LEAST * self._lease_s for when in signs_at)
        if num_expired > num_silent:
            raise Violation(
                "a standstill is no silence",
                f"{self._process.incarnation}: {num_expired} leases ended, {num_silent} readers were silent",
            )

    def _running(self) -> float:
        return self._world.now - self._process.paused_s
