"""Leases: one ends only after a silence of its reader in which the producer ran; reckoned apart from the producer."""

from baton.errors import WireError
from baton.kv import KVTransferParams
from kv_transfer.protocol.messages import TO_PRODUCER, Hold, Open
from kv_transfer.transport.base import Arrival
from simulator.world import Process, Violation, World

LEAST = 0.5
"""Of a lease: a producer charges a quarter of it for a standstill, and is stopped twice at most."""


class Leases:
    """Of one life of a worker. Knows fewer signs of life than the producer, so it never takes a silence for shorter."""

    def __init__(self, world: World, process: Process, lease_s: float) -> None:
        self._world = world
        self._process = process
        self._lease_s = lease_s
        self._heard_at: dict[tuple[str, int], float] = {}
        """When a hand-over's consumer was last heard, or its lease began, in the time in which this worker ran."""

    def begin(self, transfer: KVTransferParams) -> None:
        self._heard_at[transfer.transfer_id, transfer.attempt] = self._running()

    def hear(self, arrival: Arrival) -> None:
        if arrival.is_from_producer:
            return
        try:
            message = TO_PRODUCER.decode(arrival.header)
        except WireError:
            return
        key = message.key
        is_for_us = key.producer == self._process.incarnation
        if (
            (key.transfer_id, key.attempt) in self._heard_at
            and is_for_us
            and isinstance(message, Hold | Open)
        ):
            self._heard_at[key.transfer_id, key.attempt] = self._running()

    def check(self, num_expired: int, freed: list[KVTransferParams]) -> None:
        """So many leases have ended by silence, and these hand-overs in whatever way."""
        now = self._running()
        heard_at = [self._heard_at.pop((each.transfer_id, each.attempt), now) for each in freed]
        num_silent = sum(now - when >= LEAST * self._lease_s for when in heard_at)
        if num_expired > num_silent:
            raise Violation(
                "own standstill is nobody's silence",
                f"{self._process.incarnation}: {num_expired} leases ended, {num_silent} readers were silent",
            )

    def _running(self) -> float:
        return self._world.now - self._process.paused_s
