"""The places where a gateway looks for its fleet: a Ray cluster, or a control server; knows no gateway."""

import asyncio
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import ControlApi, GetConfiguration
from cluster.control_api.calls import ControlClient
from cluster.control_api.configuration import unpack_configuration
from cluster.control_api.zmq_carrier import ZmqCarrier


class AnotherFleet(ClusterError):
    """The fleet that was found is not the requested one; waiting longer does not help."""


class Sighting(NamedTuple):
    """A fleet that was found."""

    control: ControlApi
    config: BatonConfig
    """The owner's configuration."""
    model_path: Path
    """The model's folder on the owner's machine."""
    keys_digest: str

    @classmethod
    async def of(cls, control: ControlApi) -> "Sighting":
        """Reads the fleet's configuration. Raises ClusterError if the fleet does not answer yet."""
        configuration = await control.call(GetConfiguration())
        return cls(control, *unpack_configuration(configuration), configuration.keys_digest)


class FleetSource(Protocol):
    """A place where a gateway looks for its fleet."""

    @property
    def absence(self) -> str:
        """The message if no fleet was found."""
        ...

    async def find_fleet(self) -> Sighting:
        """The fleet at this place.

        Raises ClusterError, with the reason, if no fleet answers yet; AnotherFleet if a fleet refuses the
        connection.
        """
        ...


class RaySource:
    """Finds a fleet by its name on a Ray cluster. Needs a connection to Ray."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self.absence = f"there is no fleet named '{config.cluster.name}' (cluster.name) on this Ray cluster"

    async def find_fleet(self) -> Sighting:
        from cluster.on_ray.controller import running_fleet  # imported here: other gateways need no Ray

        control = await asyncio.to_thread(running_fleet, self._config)
        if control is None:
            raise ClusterError("no fleet of that name is running")
        return await Sighting.of(control)


class ControlServerSource:
    """Finds the fleet behind a control server. Needs an open carrier."""

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
                f"cannot join the fleet at {self._carrier.address} (cluster.fleet_address): {self._carrier.refusal}"
            ) from None
