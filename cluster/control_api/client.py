"""ControlClient: typed calls of a fleet's controller over a carrier."""

import itertools
from typing import Protocol, TypeVar

from baton.errors import FleetEnded
from baton.messages.control import (
    ControlRequest,
    FleetConfiguration,
    GetConfiguration,
    WaitView,
)
from baton.messages.control_codec import CallFrame, Reply
from cluster.control_api.calls import CALLS, CONTROL_CODEC
from cluster.control_api.configuration import unpack_configuration
from cluster.controller.desired import differences
from cluster.controller.supervisor import Patience

R = TypeVar("R")


class Carrier(Protocol):
    """Carries a call to a controller and the reply back; knows no message. Raises ClusterError on failure."""

    @property
    def address(self) -> str:
        """Where the controller is, for error messages."""
        ...

    @property
    def connection(self) -> int:
        """The number of the connection: a new connection may lead to another fleet."""
        ...

    async def exchange(self, frame: CallFrame, hangs_after_s: float | None = None) -> Reply:
        """The reply. A controller hangs if it takes `hangs_after_s` longer than `frame.timeout_s`."""
        ...


class ControlClient:
    """See baton.messages.control.ControlApi. Calls are not repeated: a broken connection ends running calls."""

    def __init__(self, carrier: Carrier, patience: Patience) -> None:
        """`patience` applies until GetConfiguration has returned the fleet's configuration."""
        self.carrier = carrier
        self.patience = patience
        self._numbers = itertools.count(1)
        self._fleet: FleetConfiguration | None = None
        self._checked_connection = 0

    async def call(self, request: ControlRequest[R]) -> R:
        """Raises the controller's error. WaitView raises FleetEnded if another fleet now answers at this address."""
        hangs_after_s = None
        if isinstance(request, WaitView):
            hangs_after_s = self.patience.unresponsive_s
            await self._check_fleet()
        wait_s = CALLS[type(request)].wait_s(request, self.patience)
        frame = CONTROL_CODEC.frame(next(self._numbers), wait_s, request)
        value = CONTROL_CODEC.value_in(await self.carrier.exchange(frame, hangs_after_s), request)
        if isinstance(value, FleetConfiguration):
            self._note_fleet(value)
        return value

    def _note_fleet(self, fleet: FleetConfiguration) -> None:
        self._fleet, self._checked_connection = fleet, self.carrier.connection
        self.patience = Patience.of(unpack_configuration(fleet)[0])

    async def _check_fleet(self) -> None:
        """Compares the fleet of a new connection with the former one."""
        if self._checked_connection == self.carrier.connection:
            return
        former = self._fleet
        now = await self.call(GetConfiguration())
        if former is None or not (found := _differences(former, now)):
            return
        self._fleet, self._checked_connection = former, -1
        raise FleetEnded(f"another fleet now answers at {self.carrier.address}: {'; '.join(found)}")


def _differences(former: FleetConfiguration, now: FleetConfiguration) -> list[str]:
    (config, model_path), (other, other_path) = unpack_configuration(former), unpack_configuration(now)
    found = differences(config, other)
    if model_path != other_path:
        found.append(f"its model is {other_path}, not {model_path}")
    return found
