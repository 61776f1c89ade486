"""What a fleet's controller answers when a gateway asks for its description."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from baton.errors import ClusterError, FleetError
from baton.fleet import FleetDescription, NodeDescription, ReplicaDescription
from baton.messages.control import ControlApi, DescribeFleet

TIMEOUT_S = 1.0
"""A controller that takes longer counts as away; views then have only what the gateway itself knows."""


@dataclass(frozen=True, slots=True)
class ControllerView:
    """One answer, or why there is none."""

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
    """Returns within TIMEOUT_S."""
    if control is None:
        return ControllerView("none")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return ControllerView("answering", await control.call(DescribeFleet()))
    except TimeoutError:
        return ControllerView("away", failure=f"no answer within {TIMEOUT_S:g} s")
    except (FleetError, ClusterError) as error:
        return ControllerView("away", failure=str(error))
