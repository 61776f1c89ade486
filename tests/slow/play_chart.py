"""Plays a rendered release without Kubernetes: isolated.sh python -m tests.slow.play_chart RENDERED.json MODELS.

Starts the commands of its pods, and waits for their probes. Asks a question over TLS with the rendered key, drains a
worker by its pod's hook, asks again, and stops. MODELS is the folder that the claim `weights` would hold. Prints one
JSON object about it.
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path

from tests.factories.chart import Object, Release
from tests.slow.pods import WORK, Pod, contents, prepare, write_hosts

VENV = Path(sys.executable).parent


def kuberay(params: dict[str, str], *head: str) -> list[str]:
    """The command that the operator makes of rayStartParams."""
    flags = [
        f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(params.items())
    ]
    return ["/bin/bash", "-c", "--", f"ulimit -n $(ulimit -Hn); ray start {' '.join([*head, *flags])}"]


class Played:
    """A release whose pods run."""

    def __init__(self, release: Release, models: Path) -> None:
        self._release = release
        self._name = release.one("RayCluster")["metadata"]["name"]
        self._models = models
        self._pods: dict[str, Pod] = {}
        self._timeline: dict[str, float] = {}

    def _pod(self, name: str, template: Object) -> Pod:
        environment = {
            "HOME": "/home/baton",
            "PATH": f"{VENV}:{os.environ['PATH']}",
            "PYTHONPATH": os.getcwd(),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        address = f"10.77.0.{11 + len(self._pods)}"
        pod = Pod(name, address, template, self._release, {"weights": self._models}, environment)
        self._pods[name] = pod
        pod.create()
        return pod

    def start(self) -> None:
        """Starts head, workers and gateway. Each starts when the parts before it are as far as Kubernetes would wait
        for."""
        ray, templates = self._release.ray, self._release.pods()
        token = {"RAY_AUTH_MODE": "token"}
        secret = self._release.of_kind("Secret")[ray["authOptions"]["secretName"]]
        token["RAY_AUTH_TOKEN"] = contents(secret)["auth_token"]
        head = self._pod("head", templates["head"])
        write_hosts({f"{self._name}-fleet": head.address})
        of_operator = {"dashboard-host": "0.0.0.0", "metrics-export-port": "8080", "block": "true"}
        params = ray["headGroupSpec"]["rayStartParams"] | of_operator
        head.start("fleet")  # a sidecar comes first, and waits for Ray
        head.start("ray-head", kuberay(params, "--head"), **token)
        self._timeline["head ready"] = head.wait_for("ray-head", "readinessProbe")
        self._timeline["control server open"] = head.wait_for_port("fleet")
        for group in ray["workerGroupSpecs"]:
            of_worker = {
                "address": f"{head.address}:6379",
                "metrics-export-port": "8080",
                "block": "true",
            }
            for number in range(group["replicas"]):
                pod = self._pod(f"{group['groupName']}{number}", group["template"])
                pod.start("ray-worker", kuberay(group["rayStartParams"] | of_worker), **token)
                self._timeline[f"{pod.name} started"] = pod.wait_for("ray-worker", "startupProbe")
        gateway = self._pod("gateway", templates["gateway"])
        frontends = {f"{self._name}-{api}": gateway.address for api in ("grpc", "http")}
        write_hosts({f"{self._name}-fleet": head.address} | frontends)
        gateway.start("gateway")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            self._timeline[f"gateway {probe}"] = gateway.wait_for("gateway", probe)
        for pod in self._pods.values():  # no earlier: workers come when their pods are there, in any order
            if "ray-worker" in pod.containers:
                self._timeline[f"{pod.name} ready"] = pod.wait_for("ray-worker", "readinessProbe")

    def ask(self) -> str:
        """An answer, over TLS, with the key of `helm test`."""
        secrets = self._release.of_kind("Secret")
        key = contents(secrets[f"{self._name}-test-key"])["test-key"]
        trusted = ssl.create_default_context(cadata=contents(secrets[f"{self._name}-tls"])["ca.crt"])
        model = Path(self._release.fleet_config()["model"]["path"]).name
        body = {"model": model, "prompt": "Why is the sky blue?", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"https://{self._name}-http:8000/v1/completions",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {key}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120, context=trusted) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def drain(self, name: str) -> tuple[int, str]:
        """Drains a worker by the hook of its pod, and then stops the pod."""
        pod = self._pods[name]
        hook = pod.containers["ray-worker"].spec["lifecycle"]["preStop"]["exec"]["command"]
        began = time.monotonic()
        code, said = pod.execute("ray-worker", hook)
        self._timeline[f"{name} drained"] = time.monotonic() - began
        del self._pods[name]
        pod.stop()
        return code, said

    def stop(self) -> dict[str, dict[str, int]]:
        """Stops the pods, gateways first. Returns the exit codes by pod and container."""
        return {name: self._pods[name].stop() for name in sorted(self._pods, key="gateway".__ne__)}

    @property
    def timeline(self) -> dict[str, float]:
        return {what: round(seconds, 1) for what, seconds in self._timeline.items()}


def main(rendered: Path, models: Path) -> None:
    prepare(("/etc", "/home"))
    played = Played(Release(tuple(json.loads(rendered.read_text())), ""), models)
    try:
        played.start()
        before = played.ask()
        code, said = played.drain("decode1")
        after = played.ask()
    except BaseException:
        for log in sorted(WORK.glob("*.log")):
            print(f"---- {log.name}", *log.read_text().splitlines()[-20:], sep="\n", file=sys.stderr)
        raise
    finally:
        codes = played.stop()
    result = {
        "before": before,
        "after": after,
        "drain": [code, said],
        "codes": codes,
        "timeline": played.timeline,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
