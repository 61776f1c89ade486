"""Network: carries the KV plane's messages, with seeded faults; each incarnation of a worker has a SimChannel on it."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.messages import PREFIX_BYTES, SEAL_BYTES, TO_CONSUMER, TO_PRODUCER
from kv_transfer.transport.base import Arrival, Bytes
from simulator.world import Process, World

REFUSAL_S = 0.3
"""After this time, enough attempts to connect to an ended process have been refused to show that it has ended."""


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """How likely each fault is for a message."""

    loss: float = 0.0
    doubling: float = 0.0
    header_damage: float = 0.0
    payload_damage: float = 0.0
    """How likely it is that payload bytes are damaged; only used where checksums must notice it."""
    lateness: float = 0.0
    """How likely it is that a message takes up to `max_lateness_s` instead of milliseconds."""
    max_lateness_s: float = 0.5
    is_ordered: bool = False
    """Messages between two workers keep their order, as over one TCP connection."""
    max_delay_s: float = 0.004


class Payload:
    """Bytes of a pool that may change in transit: half are read when they are sent, half when they arrive."""

    def __init__(self, spans: Sequence[Bytes]) -> None:
        self._spans = spans
        self._early = _joined(spans)
        self._flipped_bit: int | None = None

    def __bool__(self) -> bool:
        return bool(len(self._early))

    def damaged(self, rng: random.Random) -> "Payload":
        """The same payload with one bit flipped."""
        damaged = Payload(self._spans)
        damaged._flipped_bit = rng.randrange(len(self._early) * 8)
        return damaged

    def read(self) -> Bytes:
        """The bytes as they arrive."""
        data = self._early.copy()
        data[1::2] = _joined(self._spans)[1::2]
        if self._flipped_bit is not None:
            data[self._flipped_bit // 8] ^= 1 << (self._flipped_bit % 8)
        return data


@dataclass(slots=True)
class Network:
    """Which channel listens where, which workers are cut off from each other, and what is in transit."""

    world: World
    faults: NetworkFaults
    listening: dict[str, "SimChannel"] = field(default_factory=dict)
    """The channel that listens at each address now."""
    partitions: dict[tuple[str, str], float] = field(default_factory=dict)
    """For each pair of workers: until when no message gets from the first to the second."""
    _last_arrival: dict[tuple[str, str], float] = field(default_factory=dict)

    def post(
        self, source: str, target: str, header: bytes, payload: Payload, arrive: Callable[..., None]
    ) -> None:
        """Sends a message: `arrive(header, payload)` is called once, or, after a fault, never or twice."""
        world, faults = self.world, self.faults
        kind = kind_of(header)
        world.counts[f"message {kind}"] += 1
        world.log(source, f"-> {target} {kind} {header[:SEAL_BYTES].hex()}", lambda: describe(header))
        if self.partitions.get((source, target), 0.0) > world.now:
            world.counts["fault partitioned"] += 1
            return
        if world.is_calm:
            self._carry(source, target, header, payload, arrive)
            return
        if world.chance(faults.loss):
            world.counts["fault lost"] += 1
            return
        if world.chance(faults.header_damage):
            world.counts["fault header damaged"] += 1
            header = flip_bit(header, world.rng.randrange(len(header) * 8))
        if payload and world.chance(faults.payload_damage):
            world.counts["fault payload damaged"] += 1
            payload = payload.damaged(world.rng)
        self._carry(source, target, header, payload, arrive)
        if world.chance(faults.doubling):
            world.counts["fault doubled"] += 1
            self._carry(source, target, header, payload, arrive)

    def _carry(
        self, source: str, target: str, header: bytes, payload: Payload, arrive: Callable[..., None]
    ) -> None:
        world, faults = self.world, self.faults
        delay_s = world.between(0.0001, faults.max_delay_s)
        if not world.is_calm and world.chance(faults.lateness):
            world.counts["fault late"] += 1
            delay_s = world.between(0.0, faults.max_lateness_s)
        when, last = world.now + delay_s, self._last_arrival.get((source, target), 0.0)
        if when < last:
            if faults.is_ordered:
                when = last
            else:
                world.counts["fault overtaken"] += 1
        self._last_arrival[source, target] = max(when, last)
        world.at(when, lambda: arrive(header, payload))


class SimChannel:
    """The sockets of one incarnation: a ROUTER that others connect to, and a DEALER to each worker it talks to."""

    def __init__(self, network: Network, name: str, process: Process) -> None:
        self._network = network
        self._process = process
        self.name = name
        self.address = f"sim://{name}"
        self.num_dropped = 0
        self.on_arrival: Callable[[Arrival], None] = lambda _: None
        self.on_gone: Callable[[str], None] = lambda _: None
        """Called with the address of a process that has ended, if its host still runs and refuses connections."""
        self._peers: dict[bytes, SimChannel] = {}
        """The channel behind each identity that connected to our ROUTER."""
        self._payload = Payload(())
        network.listening[self.address] = self

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        network, late_bytes = self._network, Payload(payload)
        if isinstance(peer, str):
            network.post(
                self.name,
                peer.removeprefix("sim://"),
                header,
                late_bytes,
                lambda header, payload: self._reach_listener(peer, header, payload),
            )
        elif target := self._peers.get(peer):
            network.post(
                self.name,
                target.name,
                header,
                late_bytes,
                lambda header, payload: target.receive(
                    Arrival(self.address, is_from_producer=True, header=header), payload
                ),
            )
        else:
            self.num_dropped += 1
            return False
        return True

    def read_payload(self) -> Iterator[Bytes]:
        if self._payload:
            yield self._payload.read()

    def receive(self, arrival: Arrival, payload: Payload) -> None:
        """Handles an arriving message. A stopped process reads it when it continues, a dead process never."""
        if self._process.is_dead:
            return
        if self._process.paused_until > self._network.world.now:
            world = self._network.world
            world.at(self._process.paused_until, lambda: self.receive(arrival, payload), self._process)
            return
        self._payload = payload
        self.on_arrival(arrival)
        self._payload = Payload(())

    def _reach_listener(self, address: str, header: bytes, payload: Payload) -> None:
        """Delivers to the channel that listens at the address now, even if it belongs to a later incarnation."""
        listener = self._network.listening.get(address)
        if listener is None:
            return
        if listener._process.is_dead and _has_host(listener):
            self._network.world.after(REFUSAL_S, lambda: self._report_gone(address, listener), self._process)
        identity = f"{id_of(self)}>{id_of(listener)}".encode()
        listener._peers[identity] = self
        listener.receive(Arrival(identity, is_from_producer=False, header=header), payload)

    def _report_gone(self, address: str, listener: "SimChannel") -> None:
        """Reports that the listener's process has ended, unless another process listens at its address now."""
        if self._network.listening[address] is listener:
            self._network.world.counts["path peer gone"] += 1
            self.on_gone(address)


def _has_host(channel: SimChannel) -> bool:
    """Whether only the process ended, and its host still runs. This is so for half of all incarnations."""
    return bool(crc32(id_of(channel).encode()) % 2)


def id_of(channel: SimChannel) -> str:
    """The incarnation that the channel belongs to."""
    return channel._process.incarnation


def _joined(spans: Sequence[Bytes]) -> Bytes:
    return np.concatenate(spans) if spans else np.empty(0, np.uint8)


def flip_bit(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def kind_of(header: bytes) -> str:
    """The kind of message in an undamaged header: the first item, a short string, of the msgpack array behind the
    prefix."""
    start = PREFIX_BYTES + 2
    return header[start : start + (header[start - 1] & 31)].decode()


def describe(header: bytes) -> object:
    """The whole message, for verbose logs."""
    codec = TO_PRODUCER if kind_of(header) in ("Hold", "Open", "Ack", "Release", "Cancel") else TO_CONSUMER
    return codec.decode(header)
