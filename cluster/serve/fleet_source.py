"""Where a gateway looks for the fleet that it joins: on its Ray cluster, or at its door; knows no gateway."""

import asyncio
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.system.curve import ClusterKeys
from cluster.control_api.client import FleetClient
from cluster.controller.control import ControllerCalls


class AnotherFleet(ClusterError):
    """There is one, but not the one that is asked for: waiting longer would not help."""


class FleetHandle(ControllerCalls, Protocol):
    """A controller from the outside."""

    async def has_keys(self, keys: ClusterKeys) -> bool:
        """Whether these are the fleet's."""
        ...

    def with_config(self, config: BatonConfig) -> Self:
        """Of the same controller, for somebody who has learnt its configuration."""
        ...


class Sighting(NamedTuple):
    """A fleet that answers."""

    control: FleetHandle
    config: BatonConfig
    """As its owner said it."""
    model_path: Path
    """On the machine of its owner."""


class FleetSource(Protocol):
    """Asked again and again, until there is a fleet."""

    @property
    def absence(self) -> str:
        """For messages: that there is no fleet where it looks."""
        ...

    async def look(self) -> Sighting:
        """ClusterError, with the reason, if none answers yet; AnotherFleet if there is one that will not have us."""
        ...


class RaySource:
    """Ray has to be connected to already."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self.absence = f"there is no fleet named '{config.cluster.name}' (cluster.name) on this Ray cluster"

    async def look(self) -> Sighting:
        from cluster.on_ray.controller import (
            running_fleet,  # not above: a gateway's machine may do without Ray
        )

        control = await asyncio.to_thread(running_fleet, self._config)
        if control is None:
            raise ClusterError("nobody has this name there")
        return Sighting(control, *await control.configuration())


class DoorSource:
    """Over a connection that is open."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self.absence = f"no fleet answers at {client.address} (cluster.fleet_address)"

    async def look(self) -> Sighting:
        try:
            return Sighting(self._client, *await self._client.configuration())
        except ClusterError:
            if self._client.refusal is None:
                raise
            raise AnotherFleet(
                f"the fleet at {self._client.address} (cluster.fleet_address) is not ours: {self._client.refusal}"
            ) from None
