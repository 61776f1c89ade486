"""A rank that is lost while its worker checks the device, before it serves."""

from pathlib import Path

import psutil
import pytest

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.worker import WorkerRole
from tests.factories.models import make_model_dir
from tests.factories.security import KEYS
from worker.core import EngineCore
from worker.host import EngineHost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


def test_a_rank_that_is_killed_in_the_check_of_the_device_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ModelError would end the first start of a fleet at once."""
    check_device = EngineCore.check_device

    def check_without_rank_1(core: EngineCore) -> str | None:
        (rank,) = (
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "engine.ranks.entry" in child.cmdline()
        )
        rank.kill()
        return check_device(core)

    monkeypatch.setattr(EngineCore, "check_device", check_without_rank_1)
    sections = {"engine": {"tensor_parallel": 2, "num_threads": 1}, "scheduler": {"num_blocks": 20}}
    config = BatonConfig.from_mapping({"model": {"dtype": "float32", "load_format": "dummy"}, **sections})
    host = EngineHost(config, KEYS, make_model_dir(tmp_path / "tiny"), WorkerRole.DECODE, "d0")
    with pytest.raises(ClusterError, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL before it served$"):
        host.start()
