"""Names and labels: golden ones, two releases side by side, and names as long as Helm allows."""

import re
from typing import Any

import pytest

from baton.version import baton_version
from tests.factories.chart import Release, containers, needs_helm, render

pytestmark = needs_helm

LONGEST = "a-release-with-a-name-of-fifty-three-characters-in-all"[:53]
EVERYTHING: dict[str, Any] = {
    "model": {"path": "/models/m", "persistentVolumeClaim": {"create": True}},
    "autoscaling": {"gateway": {"enabled": True}},
    "security": {"tls": {"mode": "certManager", "issuerRef": {"name": "company"}}},
    "metrics": {part: {"enabled": True} for part in ("serviceMonitor", "podMonitor", "prometheusRule")},
}


def identities(release: Release) -> set[tuple[str, str]]:
    return {(item["kind"], item["metadata"]["name"]) for item in release.objects}


def test_golden_selectors() -> None:
    """Selectors of a Deployment can never change, and all other selectors must match its pods."""
    release = render()

    def labels(component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "baton",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": component,
        }

    assert {name: pod["metadata"]["labels"] for name, pod in release.pods().items()} == {
        component: labels(component) for component in ("gateway", "head", "prefill", "decode")
    }
    assert release.one("Deployment")["spec"]["selector"] == {"matchLabels": labels("gateway")}
    workers = labels("") | {"ray.io/node-type": "worker"}
    del workers["app.kubernetes.io/component"]
    assert {name: service["spec"]["selector"] for name, service in release.of_kind("Service").items()} == {
        "demo-baton-grpc": labels("gateway"),
        "demo-baton-http": labels("gateway"),
        "demo-baton-fleet": labels("head"),
        "demo-baton-workers": workers,
    }


def test_golden_labels() -> None:
    assert render().one("RayCluster")["metadata"]["labels"] == {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "ray",
        "app.kubernetes.io/part-of": "baton",
        "app.kubernetes.io/version": baton_version(),
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": f"baton-{baton_version()}",
    }


def test_golden_names() -> None:
    assert identities(render()) == {
        ("ConfigMap", "demo-baton-fleet"),
        ("ConfigMap", "demo-baton-gateway"),
        ("Deployment", "demo-baton-gateway"),
        *(("NetworkPolicy", f"demo-baton-{part}") for part in ("gateway", "head", "prefill", "decode")),
        ("Pod", "demo-baton-test"),
        ("PodDisruptionBudget", "demo-baton-gateway"),
        ("RayCluster", "demo-baton"),
        *(
            ("Secret", f"demo-baton-{part}")
            for part in ("api-keys", "cluster", "metrics-key", "ray-token", "test-key", "tls")
        ),
        *(("Service", f"demo-baton-{part}") for part in ("fleet", "grpc", "http", "workers")),
        *(("ServiceAccount", f"demo-baton-{part}") for part in ("gateway", "head", "worker")),
    }


@pytest.mark.parametrize(
    ("one", "other"), [("blue", "green"), (LONGEST, LONGEST[:-1] + "x"), ("1a", "a"), ("a.b", "a-c")]
)
def test_two_releases_share_no_object_and_no_pod(one: str, other: str) -> None:
    first, second = render(EVERYTHING, name=one), render(EVERYTHING, name=other)
    assert identities(first) & identities(second) == set()
    for release, name in ((first, one), (second, other)):
        assert {
            pod["metadata"]["labels"]["app.kubernetes.io/instance"] for pod in release.pods().values()
        } == {name}
    configured = [release.fleet_config()["cluster"]["name"] for release in (first, second)]
    assert len(set(configured)) == 2, "on one Ray cluster they would be one fleet"


@pytest.mark.parametrize("name", [LONGEST, "9-lives", "with.dots", "baton"])
def test_every_name_is_one_that_kubernetes_takes(name: str) -> None:
    release = render(EVERYTHING, name=name)
    for kind, found in identities(release):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found), f"{kind} {found}"
        assert len(found) <= 63, f"{kind} {found}"
    # KubeRay adds to the cluster's name, and refuses more than 53 characters; here there is room for its own.
    assert len(release.one("RayCluster")["metadata"]["name"]) <= 40


def test_a_release_that_is_called_like_the_chart_is_not_called_so_twice() -> None:
    assert render(name="my-baton").one("RayCluster")["metadata"]["name"] == "my-baton"
    assert render({"fullnameOverride": "llm"}).one("RayCluster")["metadata"]["name"] == "llm"


def _values_in(part: Any) -> list[Any]:
    """All values at any depth, without keys."""
    if isinstance(part, dict | list):
        return [
            each for item in (part.values() if isinstance(part, dict) else part) for each in _values_in(item)
        ]
    return [part]


def test_names_that_look_like_numbers_stay_strings() -> None:
    existing, folder = {"existingSecret": "123"}, "/a: b"
    security: dict[str, Any] = dict.fromkeys(
        ("clusterSecret", "rayToken", "apiKeys", "metricsKey", "testKey"), existing
    )
    security["tls"] = existing | {"mode": "existingSecret", "serverName": "123"}
    names = {"nameOverride": "123", "fullnameOverride": "on"}
    given = names | {
        "image": {"repository": "12", "tag": "34"},
        "model": {"existingClaim": "123", "mountPath": folder, "path": f"{folder}/c"},
        "prefill": {"priorityClassName": "123", "runtimeClassName": "123"},
        "gateway": {"responseStore": existing},
        "rayHead": {"gcsFaultTolerance": existing | {"enabled": True, "redisAddress": "redis://a: b"}},
        "security": security,
        "metrics": EVERYTHING["metrics"],
    }
    created = names | {
        "model": {
            "path": "acme/tiny",
            "mountPath": folder,
            "persistentVolumeClaim": {"create": True, "storageClassName": "123"},
            "hub": {"tokenSecret": {"name": "123", "key": "123"}},
        },
        "security": EVERYTHING["security"],
    }
    for values in (given, created):
        release = render(values, name="4711")
        found = _values_in(list(release.objects))
        assert [
            each for each in found if not isinstance(each, str) and each in (123, 4711, 12 * 60 + 34)
        ] == []
        assert (
            release.one("RayCluster")["metadata"]["name"] == release.fleet_config()["cluster"]["name"] == "on"
        )
        mounts = containers(release.pods()["gateway"])["gateway"]["volumeMounts"]
        assert [mount["mountPath"] for mount in mounts if mount["name"] == "model"] == [folder]
