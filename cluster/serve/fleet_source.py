"""Where a gateway looks for the fleet that it joins: on its Ray cluster, or at a control server; knows no gateway."""

import asyncio
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import ControlApi, GetConfiguration
from cluster.control_api.client import ControlClient
from cluster.control_api.configuration import unpack_configuration
from cluster.control_api.zmq_carrier import ZmqCarrier


class AnotherFleet(ClusterError):
    """There is a fleet, but not the one that is asked for: waiting longer would not help."""


class Sighting(NamedTuple):
    """A fleet that answers."""

    control: ControlApi
    config: BatonConfig
    """As its owner set it."""
    model_path: Path
    """On the machine of its owner."""
    keys_digest: str

    @classmethod
    async def of(cls, control: ControlApi) -> "Sighting":
        """ClusterError if the fleet does not answer yet."""
        configuration = await control.call(GetConfiguration())
        return cls(control, *unpack_configuration(configuration), configuration.keys_digest)


class FleetSource(Protocol):
    """Asked again and again, until there is a fleet."""

    @property
    def absence(self) -> str:
        """For messages: that there is no fleet where it looks."""
        ...

    async def find_fleet(self) -> Sighting:
        """ClusterError, with the reason, if none answers yet; AnotherFleet if one refuses the connection."""
        ...


class RaySource:
    """Ray has to be connected to already."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self.absence = f"there is no fleet named '{config.cluster.name}' (cluster.name) on this Ray cluster"

    async def find_fleet(self) -> Sighting:
        from cluster.on_ray.controller import running_fleet  # not above: a gateway needs no Ray elsewhere

        control = await asyncio.to_thread(running_fleet, self._config)
        if control is None:
            raise ClusterError("no fleet of that name is running")
        return await Sighting.of(control)


class ControlServerSource:
    """Over a connection that is open."""

    def __init__(self, client: ControlClient, carrier: ZmqCarrier) -> None:
        self._client = client
        self._carrier = carrier
        self.absence = f"no fleet answers at {carrier.address} (cluster.fleet_address)"

    async def find_fleet(self) -> Sighting:
        try:
            return await Sighting.of(self._client)
        except ClusterError:
            if self._carrier.refusal is None:
                raise
            raise AnotherFleet(
                f"the fleet at {self._carrier.address} (cluster.fleet_address) is not ours: {self._carrier.refusal}"
            ) from None
