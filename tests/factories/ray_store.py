"""Ray's key-value store and its table of jobs, in this process."""

from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import ray
from ray.experimental import internal_kv

from cluster.on_ray import store

_job = ContextVar("job", default="01000000")


class FakeRayStore:
    """Several commands may use it: each task of a test may be the driver of another job (`act_as`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content: dict[tuple[bytes, bytes], bytes] = {}
        """Values by namespace and key."""
        self.running = ["01000000", "02000000", "03000000"]
        """Jobs whose command still runs."""
        self.before: dict[str, Callable[[], None]] = {}
        """What another command does just before the next `list`, `jobs` or `put`."""
        monkeypatch.setattr(internal_kv, "_internal_kv_get", self._get)
        monkeypatch.setattr(internal_kv, "_internal_kv_put", self._put)
        monkeypatch.setattr(internal_kv, "_internal_kv_del", self._del)
        monkeypatch.setattr(internal_kv, "_internal_kv_list", self._list)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=_job.get))
        monkeypatch.setattr(store, "jobs", self._jobs)

    @staticmethod
    def act_as(job: str) -> None:
        """From now on, this task belongs to the driver of this job."""
        _job.set(job)

    def _others_act(self, before: str) -> None:
        self.before.pop(before, lambda: None)()

    def _jobs(self) -> list[dict[str, object]]:
        self._others_act("jobs")
        return [
            {
                "JobID": f"{number:02}000000",
                "IsDead": f"{number:02}000000" not in self.running,
                "DriverPid": 700 + number,
                "DriverIPAddress": "10.0.0.1",
            }
            for number in range(9)
        ]

    def _get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.content.get((namespace, key))

    def _put(self, key: bytes, content: bytes, *, overwrite: bool, namespace: bytes) -> bool:
        self._others_act("put")
        was_there = (namespace, key) in self.content
        if overwrite or not was_there:
            self.content[namespace, key] = content
        return was_there

    def _del(self, key: bytes, *, del_by_prefix: bool = False, namespace: bytes) -> int:
        gone = [key] if not del_by_prefix else self._list(key, namespace=namespace)
        return sum(self.content.pop((namespace, each), None) is not None for each in gone)

    def _list(self, prefix: bytes, *, namespace: bytes) -> list[bytes]:
        self._others_act("list")
        return [key for its, key in self.content if its == namespace and key.startswith(prefix)]
