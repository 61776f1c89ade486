"""Which pods an upgrade restarts, and what it must not change."""

from typing import Any

import pytest

from tests.factories.chart import Object, Release, merged, needs_helm, render
from tests.factories.kubernetes_api import render_over

pytestmark = needs_helm

KEPT: dict[str, Any] = {
    "security": {"tls": {"mode": "none"}},
    "rayHead": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis://redis:6379"}},
}


def rolled(changes: dict[str, Any]) -> set[str]:
    """The components whose pods are replaced after this change of values. `ray`: KubeRay sees a changed cluster."""
    before, after = render(KEPT), render(merged(KEPT, changes))
    was, now = before.pods(), after.pods()
    changed = {component for component in was | now if was.get(component) != now.get(component)}
    return changed | ({"ray"} if without_scale(before) != without_scale(after) else set())


def without_scale(release: Release) -> Object:
    """The part of the cluster that KubeRay's strategy Recreate compares: everything but the numbers of pods."""
    counts = ("replicas", "minReplicas", "maxReplicas")
    groups = [
        {key: value for key, value in group.items() if key not in counts}
        for group in release.ray["workerGroupSpecs"]
    ]
    return release.ray | {"workerGroupSpecs": groups}


FLEET = {"head", "ray"}
EVERYTHING = {"gateway", "head", "prefill", "decode", "ray"}

CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "how many gateways": ({"gateway": {"replicas": 5}}, set()),
    "autoscaling of gateways": ({"autoscaling": {"gateway": {"enabled": True}}}, set()),
    "services": ({"gateway": {"grpcService": {"type": "LoadBalancer"}}}, set()),
    "a new API key": ({"security": {"apiKeys": {"keys": [{"name": "alice", "sha256": "a" * 64}]}}}, set()),
    "network policies": ({"networkPolicy": {"enabled": False}}, set()),
    "metrics": ({"metrics": {"prometheusRule": {"enabled": True}, "podMonitor": {"enabled": True}}}, set()),
    "the port of metrics": ({"metrics": {"port": 9401}}, FLEET | {"prefill", "decode"}),
    "budgets": ({part: {"podDisruptionBudget": {"enabled": True}} for part in ("decode", "rayHead")}, set()),
    "a gateway's configuration": ({"config": {"gateway": {"max_queued": 8}}}, {"gateway"}),
    "memory of gateways": ({"gateway": {"resources": {"limits": {"memory": "3Gi"}}}}, {"gateway"}),
    "the fleet's configuration": ({"config": {"scheduler": {"max_num_seqs": 8}}}, FLEET),
    "what everybody logs": ({"config": {"logging": {"level": "info"}}}, FLEET | {"gateway"}),
    "how many workers": ({"prefill": {"replicas": 2}, "decode": {"replicas": 4}}, set()),
    "no prefill workers": ({"prefill": {"replicas": 0}}, set()),
    "memory of decode workers": ({"decode": {"shmSize": "4Gi"}}, {"decode", "ray"}),
    "ranks of prefill workers": ({"prefill": {"tensorParallel": 2}}, FLEET | {"prefill"}),
    "the model": ({"model": {"path": "/elsewhere/model", "inImage": True}}, FLEET | {"gateway"}),
    "the image": ({"image": {"tag": "next"}}, EVERYTHING),
    "how long to drain": ({"drain": {"timeoutSeconds": 99}}, EVERYTHING),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_upgrade_starts_anew_what_it_must_and_no_more(change: str) -> None:
    values, expected = CHANGES[change]
    assert rolled(values) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"image": {"tag": "next"}},
        {"nameOverride": ""},
        {"gateway": {"podLabels": {"a": "b"}}},
        {"device": "cpu"},
    ],
    ids=["image", "names", "labels", "device"],
)
def test_immutable_fields_of_kubernetes_objects_stay(changes: dict[str, Any]) -> None:
    before, after = render(KEPT), render(merged(KEPT, changes))
    assert after.one("Deployment")["spec"]["selector"] == before.one("Deployment")["spec"]["selector"]
    for name, service in before.of_kind("Service").items():
        assert after.of_kind("Service")[name]["spec"].get("clusterIP") == service["spec"].get("clusterIP")


def test_gateways_roll_without_one_fewer() -> None:
    """Gateways need no GPU, so there is room for one more."""
    strategy = render().one("Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def test_an_autoscaler_is_not_overruled_by_an_upgrade() -> None:
    scaled = render({"autoscaling": {"gateway": {"enabled": True}}})
    assert "replicas" not in scaled.one("Deployment")["spec"]
    assert scaled.one("HorizontalPodAutoscaler")["spec"]["minReplicas"] == 2


def store(values: Object) -> str:
    """The place in Redis where Ray's head looks for its former state."""
    name: str = render(merged(KEPT, values)).ray["gcsFaultToleranceOptions"]["externalStorageNamespace"]
    return name


@pytest.mark.parametrize("change", CHANGES)
def test_another_fleet_does_not_meet_the_controller_of_the_last_one(change: str) -> None:
    """The next head of the same fleet finds that controller, and continues it."""
    values, expected = CHANGES[change]
    is_another = change == "the image" or "head" in expected
    assert (store(values) != store({})) is is_another


def test_two_releases_share_no_store() -> None:
    names = {
        render(KEPT, name=name, namespace=namespace)
        .ray["gcsFaultToleranceOptions"]["externalStorageNamespace"]
        .rpartition(".")[0]
        for name in ("blue", "green")
        for namespace in ("llm", "test")
    }
    assert names == {"llm.blue-baton", "llm.green-baton", "test.blue-baton", "test.green-baton"}


HPA: Object = {"autoscaling": {"gateway": {"enabled": True, "minReplicas": 3, "maxReplicas": 6}}}


@pytest.mark.parametrize(("found", "expected"), [(5, 5), (1, 3), (9, 6)])
def test_who_turns_autoscaling_on_loses_no_gateway(found: int, expected: int) -> None:
    """A later upgrade loses no gateway, either. If the key `replicas` was in the earlier manifest, but is not in this
    one, Kubernetes sets it to 1."""
    running = render({"gateway": {"replicas": found}}).one("Deployment")
    scaled = render_over([running], HPA).one("Deployment")
    assert scaled["spec"]["replicas"] == expected
    again = render_over([scaled], HPA).one("Deployment")
    assert again["spec"]["replicas"] == expected
    assert render_over([scaled]).one("Deployment")["spec"]["replicas"] == 2, "by gateway.replicas again"


WORKERS: Object = {"autoscaling": {"workers": {"enabled": True, "maxDecode": 6}}}


@pytest.mark.parametrize(("found", "expected"), [(5, 5), (9, 6)])
def test_an_upgrade_asks_for_as_many_workers_as_rays_autoscaler_has_come_to(
    found: int, expected: int
) -> None:
    """So an upgrade that is applied by force removes no worker."""
    running = render(WORKERS).one("RayCluster")
    (decode,) = (group for group in running["spec"]["workerGroupSpecs"] if group["groupName"] == "decode")
    scaled = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": running["metadata"]}
    scaled["spec"] = {"workerGroupSpecs": [decode | {"replicas": found}]}
    groups = render_over([scaled], WORKERS).ray["workerGroupSpecs"]
    assert {group["groupName"]: group["replicas"] for group in groups} == {"prefill": 1, "decode": expected}
    fixed = render_over([scaled], {"decode": {"replicas": 2}}).ray["workerGroupSpecs"]
    assert {group["groupName"]: group["replicas"] for group in fixed} == {"prefill": 1, "decode": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"maxDecode": 9},
        {"config": {"interval_s": 1.0}},
        {"idleSeconds": 60},
        {"enabled": False, "maxDecode": 8},
    ],
    ids=["bounds", "targets", "idle", "off"],
)
def test_what_autoscaling_of_workers_may_do_is_of_the_whole_fleet(changes: Object) -> None:
    """As docs/kubernetes.md says: the controller rereads only the numbers of workers."""
    scaled: Object = merged(KEPT, WORKERS)
    before = render(scaled)
    after = render(merged(scaled, {"autoscaling": {"workers": changes}}))
    assert without_scale(before) != without_scale(after)


def test_the_claim_outlives_the_release() -> None:
    values = {"model": {"path": "/models/m", "persistentVolumeClaim": {"create": True}}}
    annotations = render(values).one("PersistentVolumeClaim")["metadata"]["annotations"]
    assert annotations == {"helm.sh/resource-policy": "keep"}
