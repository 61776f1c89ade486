"""ControllerView: a fleet's description, as a gateway gets it from the fleet's controller."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from baton.errors import ClusterError, FleetError
from baton.fleet import FleetDescription, NodeDescription, ReplicaDescription
from baton.messages.control import ControlApi, DescribeFleet

TIMEOUT_S = 1.0
"""A controller that answers later counts as away. Then views contain only what the gateway itself knows."""


@dataclass(frozen=True, slots=True)
class ControllerView:
    """The controller's answer, or why there is no answer."""

    state: Literal["none", "answering", "away"]
    fleet: FleetDescription | None = None
    failure: str = ""

    @property
    def replicas(self) -> tuple[ReplicaDescription, ...]:
        return self.fleet.replicas if self.fleet else ()

    @property
    def nodes(self) -> tuple[NodeDescription, ...]:
        return self.fleet.nodes if self.fleet else ()


async def ask_controller(control: ControlApi | None) -> ControllerView:
    """Asks the controller for the fleet's description. Returns within TIMEOUT_S."""
    if control is None:
        return ControllerView("none")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return ControllerView("answering", await control.call(DescribeFleet()))
    except TimeoutError:
        return ControllerView("away", failure=f"no answer within {TIMEOUT_S:g} s")
    except (FleetError, ClusterError) as error:
        return ControllerView("away", failure=str(error))
