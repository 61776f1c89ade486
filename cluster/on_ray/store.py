"""What a fleet keeps in Ray's key-value store: the bytes of its desired state, and which command owns it."""

import ray
from ray._private.state import jobs
from ray.experimental import internal_kv


class RayStore:
    """Bytes in Ray's key-value store, which lasts as long as the cluster. See cluster.controller.desired.Store."""

    def __init__(self, name: str, fleet: str) -> None:
        """`name` and `fleet`: the name and the id of the fleet."""
        self._namespace = f"baton/{name}".encode()
        self._key = fleet.encode()
        self._claims = f"{fleet}/".encode()

    def load(self) -> bytes | None:
        return self._get(self._key)

    def save(self, content: bytes) -> None:
        self._put(self._key, content, overwrite=True)

    def claim(self) -> str | None:
        """Makes this command the fleet's owner. Returns None, or which process owns the fleet already.

        The latest claim counts, for as long as Ray runs the job of its command. Each claim has the next number, and
        Ray stores a number only once. So if two commands find no owner at the same time, only one becomes the owner.
        """
        job: str = ray.get_runtime_context().get_job_id()
        number, owner = self._latest_claim()
        # Read last, so that every claimant is among them.
        running = {each["JobID"]: each for each in jobs() if not each["IsDead"]}
        if owner not in running:
            self._put(self._claims + str(number + 1).encode(), job.encode(), overwrite=False)
            _, owner = self._latest_claim()
        if owner == job:
            return None
        found = running.get(owner)
        return f"process {found['DriverPid']} on {found['DriverIPAddress']}" if found else f"Ray job {owner}"

    def clear(self) -> None:
        """Removes the stored bytes, and the claims on the fleet."""
        internal_kv._internal_kv_del(self._key, del_by_prefix=True, namespace=self._namespace)

    def clear_others(self) -> None:
        """Removes the stored bytes of earlier fleets of this name."""
        for key in self._keys(b""):
            if not key.startswith(self._key):
                internal_kv._internal_kv_del(key, namespace=self._namespace)

    def _latest_claim(self) -> tuple[int, str]:
        """The number of the latest claim, and the id of its command's job; 0 without a claim."""
        numbers = [int(key.removeprefix(self._claims)) for key in self._keys(self._claims)]
        latest = max(numbers, default=0)
        return latest, (self._get(self._claims + str(latest).encode()) or b"").decode()

    def _get(self, key: bytes) -> bytes | None:
        content: bytes | None = internal_kv._internal_kv_get(key, namespace=self._namespace)
        return content

    def _put(self, key: bytes, content: bytes, *, overwrite: bool) -> None:
        internal_kv._internal_kv_put(key, content, overwrite=overwrite, namespace=self._namespace)

    def _keys(self, prefix: bytes) -> list[bytes]:
        return list(internal_kv._internal_kv_list(prefix, namespace=self._namespace))
