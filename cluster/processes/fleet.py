"""A fleet of child processes on this machine, with its controller in this process: `baton serve` without Ray."""

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.system.curve import ClusterSecret, derive_keys
from baton.system.signals import unless
from cluster.control_api.calls import InProcessControl
from cluster.control_api.configuration import keys_digest, pack_configuration
from cluster.controller.controller import Controller
from cluster.controller.desired import Memory
from cluster.controller.owner import OnProgress, OnServing, first_start
from cluster.processes.launcher import ProcessLauncher
from cluster.processes.worker_process import write_config


class ProcessFleet:
    """See cluster.serve.owned_fleet.Fleet. The workers end with this process, even on SIGKILL."""

    def __init__(self, config: BatonConfig, secret: ClusterSecret | None, model_path: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        path = write_config(self._folder.name, config, model_path)
        self._start_timeout_s = config.cluster.start_timeout_s
        self.launcher = ProcessLauncher(config, path, secret)
        self.controller = Controller(config, self.launcher, Memory(), SystemClock())
        digest = keys_digest(derive_keys(secret))
        self._control = InProcessControl(self.controller, pack_configuration(config, model_path, digest))
        self._has_started = False

    async def start(self, on_progress: OnProgress, on_serving: OnServing | None = None) -> InProcessControl:
        await self.controller.start()
        shortage = "no worker could be started"
        on_enough = on_serving and partial(self._on_enough, on_serving)
        await first_start(self._control, self._start_timeout_s, shortage, on_progress, on_enough)
        self._has_started = True
        return self._control

    async def _on_enough(self, on_serving: OnServing) -> None:
        self._has_started = True
        await on_serving(self._control)

    async def end(self, hurry: asyncio.Event) -> None:
        try:
            if not self._has_started or not await unless(hurry, self.controller.shutdown(may_drain=True)):
                await self.controller.shutdown(may_drain=False)
        finally:
            self._folder.cleanup()
