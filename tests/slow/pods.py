"""Pods without Kubernetes. Each pod has a network, and each container has its mounts over a read-only root file
system.

For processes that were started by isolated.sh, whose namespaces hide all of this from the machine. This module does as
literally as possible what a kubelet does: commands, environment, volumes, probes and hooks are those of the pod's
template. Not played: users, limits, policies, name services.
"""

import base64
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.factories.chart import Object, Release

BRIDGE = "10.77.0.1"
PATIENCE_S = 120.0
WORK = Path("/run/pods")
"""Volumes and logs, while all of this lasts."""


def run(*command: str) -> None:
    """Raises CalledProcessError, whose output tells why."""
    subprocess.run(command, check=True, timeout=60)


def prepare(folders: tuple[str, ...]) -> None:
    """A network for pods, and room for mount points in these folders, which only this namespace sees."""
    run("mount", "-t", "tmpfs", "none", "/run")
    for folder in folders:
        upper, spare = WORK / f"upper{folder}", WORK / f"spare{folder}"
        upper.mkdir(parents=True)
        spare.mkdir(parents=True)
        run(
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            f"lowerdir={folder},upperdir={upper},workdir={spare}",
            folder,
        )
    run("ip", "link", "add", "pods", "type", "bridge")
    run("ip", "address", "add", f"{BRIDGE}/24", "dev", "pods")
    run("ip", "link", "set", "pods", "up")


@dataclass
class Container:
    """One that runs."""

    spec: Object
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Pod:
    """A pod that is started container by container."""

    name: str
    address: str
    template: Object
    release: Release
    claims: dict[str, Path]
    """Folders that stand for claims."""
    environment: dict[str, str]
    """What the image sets."""
    containers: dict[str, Container] = field(default_factory=dict)

    def create(self) -> None:
        """Its network and its volumes."""
        run("ip", "netns", "add", self.name)
        link = f"v-{self.name}"[:15]
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", link, "master", "pods", "up")
        for arguments in (
            ("address", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            run("ip", "-n", self.name, *arguments)
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        run("ip", "-n", self.name, "route", "add", "default", "via", BRIDGE)  # by which Ray knows its address
        for volume in self.template["spec"]["volumes"]:
            self._make_volume(volume)

    def _folder(self, volume: str) -> Path:
        return WORK / "volumes" / self.name / volume

    def _make_volume(self, volume: Object) -> None:
        self._folder(volume["name"]).mkdir(parents=True)
        if claim := volume.get("persistentVolumeClaim"):
            run("mount", "--bind", str(self.claims[claim["claimName"]]), str(self._folder(volume["name"])))
            return
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            for kind, key in (("configMap", "ConfigMap"), ("secret", "Secret")):
                if part := source.get(kind):
                    name = part.get("name") or part["secretName"]
                    content = contents(self.release.of_kind(key)[name])
                    items = part.get("items") or [{"key": each, "path": each} for each in content]
                    for item in items:
                        (self._folder(volume["name"]) / item["path"]).write_text(content[item["key"]])

    def start(self, name: str, command: list[str] | None = None, **variables: str) -> Container:
        """Starts a container. `command`: the command that the operator adds if the template lacks it."""
        spec = next(each for each in self._specs() if each["name"] == name)
        log = WORK / f"{self.name}.{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._entering(spec, command or spec["command"]),
                env=self._variables(spec) | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        container = Container(spec, process, log)
        self.containers[name] = container
        return container

    def wait_for_port(self, name: str) -> float:
        """Seconds until a sidecar has opened its port. Raises AssertionError if it ends or takes too long."""
        container, began = self.containers[name], time.monotonic()
        (port,) = container.spec["ports"]
        while not is_open(self.address, port["containerPort"]):
            assert container.process.poll() is None, f"{self.name}/{name} ended"
            assert time.monotonic() - began < PATIENCE_S, f"{self.name}/{name} opens no port"
            time.sleep(0.2)
        return time.monotonic() - began

    def execute(self, name: str, command: list[str]) -> tuple[int, str]:
        """Runs a command in that container, as a kubelet runs hooks. Returns its exit code and its output."""
        spec = self.containers[name].spec
        done = subprocess.run(
            self._entering(spec, command),
            env=self._variables(spec),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout + done.stderr

    def _specs(self) -> list[Object]:
        spec = self.template["spec"]
        return [*spec.get("initContainers", []), *spec["containers"]]

    def _entering(self, spec: Object, command: list[str]) -> list[str]:
        """The command within the pod's network and the container's mounts."""
        mounts = [(self._folder(mount["name"]), mount) for mount in spec["volumeMounts"]]
        steps = []
        for folder, mount in sorted(mounts, key=lambda each: str(each[1]["mountPath"])):
            steps.append(f"mkdir -p {mount['mountPath']} && mount --bind {folder} {mount['mountPath']}")
            if mount.get("readOnly"):
                steps.append(f"mount -o remount,bind,ro {mount['mountPath']}")
        assert spec["securityContext"]["readOnlyRootFilesystem"]
        script = " && ".join([*steps, "mount -o remount,bind,ro /", "cd $HOME", 'exec "$@"'])
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--mount",
            "bash",
            "-c",
            script,
            self.name,
            *command,
        ]

    def _variables(self, spec: Object) -> dict[str, str]:
        return self.environment | {each["name"]: self._value(each) for each in spec.get("env", [])}

    def _value(self, variable: Object) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable["value"])
        if reference := source.get("secretKeyRef"):
            return contents(self.release.of_kind("Secret")[reference["name"]])[reference["key"]]
        assert source == {"fieldRef": {"fieldPath": "status.podIP"}}
        return self.address

    def wait_for(self, name: str, probe: str) -> float:
        """Seconds until this probe of the container succeeds. Raises AssertionError if the container ends or takes too
        long."""
        container, began = self.containers[name], time.monotonic()
        while not self.asks(name, probe):
            assert container.process.poll() is None, f"{self.name}/{name} ended"
            assert time.monotonic() - began < PATIENCE_S, f"{self.name}/{name}: the {probe} says no"
            time.sleep(0.2)
        return time.monotonic() - began

    def asks(self, name: str, probe: str) -> bool:
        """Whether the probe succeeds now."""
        spec = self.containers[name].spec
        how = spec[probe]
        if tcp := how.get("tcpSocket"):
            return is_open(self.address, port_of(spec, tcp["port"]))
        http = how["httpGet"]
        url = f"{http['scheme'].lower()}://{self.address}:{port_of(spec, http['port'])}{http['path']}"
        try:
            with urllib.request.urlopen(
                url, timeout=how.get("timeoutSeconds", 1), context=unchecked()
            ) as answer:
                return bool(200 <= answer.status < 400)
        except (OSError, urllib.error.HTTPError):
            return False

    def stop(self) -> dict[str, int]:
        """Stops the pod as a kubelet does: SIGTERM, to sidecars last, and SIGKILL after the grace period. Returns the
        exit codes."""
        sidecars = {each["name"] for each in self.template["spec"].get("initContainers", [])}
        deadline = time.monotonic() + self.template["spec"].get("terminationGracePeriodSeconds", 30)
        codes = {}
        for name in sorted(self.containers, key=lambda each: each in sidecars):
            process = self.containers[name].process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                codes[name] = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                codes[name] = process.wait()
        return codes


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def contents(item: Object) -> dict[str, str]:
    """Of a Secret or a ConfigMap."""
    data: dict[str, str] = dict(item.get("data", {}))
    if item["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()} | item.get(
            "stringData", {}
        )
    return data


def port_of(spec: Object, port: Any) -> int:
    named = {each["name"]: each["containerPort"] for each in spec["ports"]}
    return int(named.get(port, port))


def unchecked() -> ssl.SSLContext:
    """A TLS context that checks no certificate, like a kubelet's."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def write_hosts(addresses: dict[str, str]) -> None:
    """Writes the names that the cluster's name service would know."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    Path("/etc/hosts").write_text("\n".join(lines) + "\n")
