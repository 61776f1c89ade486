"""FollowingGateway: what happens before a gateway's ports are open."""

from typing import Any, cast
from unittest.mock import Mock

import pytest

from baton.config import BatonConfig
from baton.errors import ConfigError
from cluster.serve import following_gateway
from cluster.serve.following_gateway import FollowingGateway
from gateway import Gateway


async def test_c58_memory_is_settled_before_a_client_can_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Mock()
    monkeypatch.setattr(following_gateway, "settle", settle)

    class TakenPort:
        async def start(self) -> None:
            settle.assert_called_once()
            raise ConfigError("the port is in use")

    control: Any = None
    starting = FollowingGateway(BatonConfig(), cast("Gateway", TakenPort()), control)
    with pytest.raises(ConfigError):
        await starting.start()
