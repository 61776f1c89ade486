"""How pods start, answer probes and leave; who may reach them."""

from typing import Any

import pytest

from baton.config import BatonConfig
from baton.hub_name import HubName
from cluster.controller.supervisor import Patience
from tests.factories.chart import VALUES_OF_CI, Object, Refused, containers, needs_helm, render
from tests.helm.test_one_truth import commands_of

pytestmark = needs_helm

(PRODUCTION,) = (path for path in VALUES_OF_CI if path.name == "production-values.yaml")
DRAIN: dict[str, Any] = {
    "drain": {"timeoutSeconds": 100, "leaseSeconds": 20, "unresponsiveSeconds": 8, "slackSeconds": 7}
}


@pytest.mark.parametrize("values", [DRAIN, {}], ids=["given", "default"])
def test_a_worker_has_the_time_that_leaving_takes(values: Object) -> None:
    """docs/operations.md describes this time. Some more is left to end the process."""
    release = render(values)
    leaving_s = Patience.of(BatonConfig.from_mapping(release.fleet_config())).whole_drain_s
    (drain,) = {tuple(command) for command in commands_of(release) if command[1] == "drain"}
    assert float(drain[drain.index("--timeout") + 1]) == leaving_s
    for role in ("prefill", "decode"):
        assert release.pods()[role]["spec"]["terminationGracePeriodSeconds"] >= leaving_s + 5


@pytest.mark.parametrize(("component", "container"), [("head", "ray-head"), ("decode", "ray-worker")])
def test_a_node_leaves_by_its_own_address_at_its_own_controller(component: str, container: str) -> None:
    release = render(name="blue")
    (drain,) = {tuple(command) for command in commands_of(release) if command[1] == "drain"}
    assert drain[drain.index("--node") + 1] == "$POD_IP", "put in by the shell, since Kubernetes does not"
    assert drain[drain.index("--fleet-address") + 1] == "blue-baton-fleet:6390"
    ray = containers(release.pods()[component])[container]
    environment = {variable["name"]: variable for variable in ray["env"]}
    assert environment["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert environment["BATON_CLUSTER_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == "blue-baton-cluster"


def test_the_head_outlives_workers_that_begin_to_drain_with_it() -> None:
    """In an upgrade by Recreate, all workers drain with the head. Their hooks have time to begin before the
    head asks which workers drain."""
    pods = render(DRAIN).pods()
    head = containers(pods["head"])["ray-head"]
    assert head["lifecycle"]["preStop"]["exec"]["command"][2].startswith("sleep 10; baton drain ")
    grace_s = {name: pods[name]["spec"]["terminationGracePeriodSeconds"] for name in ("head", "decode")}
    assert grace_s["head"] == grace_s["decode"] + 10
    assert {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"} in head["env"]
    fleet = containers(pods["head"])["fleet"]
    assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "10"} in fleet["env"], (
        "it ends after Ray"
    )
    for probe in ("startupProbe", "livenessProbe"):
        assert head[probe]["terminationGracePeriodSeconds"] == 30, "a Ray that hangs has no controller to ask"


def test_a_gateway_waits_for_load_balancers_and_for_running_answers() -> None:
    pod = render(DRAIN).pods()["gateway"]["spec"]
    (gateway,) = pod["containers"]
    assert gateway["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]
    assert pod["terminationGracePeriodSeconds"] == 10 + 100 + 7


def test_a_gateway_is_ready_when_it_can_serve_and_alive_regardless_of_other_processes() -> None:
    (gateway,) = render({"controller": {"startTimeoutSeconds": 3600}}).pods()["gateway"]["spec"]["containers"]
    startup = gateway["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 3600, "a large model may load for so long"
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTPS"}
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}


def test_who_waits_for_gateways_waits_as_long_as_the_fleet_may_take() -> None:
    """By default, Kubernetes would give up after ten minutes, and so would `kubectl rollout status` and `helm install
    --wait`."""
    release = render({"controller": {"startTimeoutSeconds": 3600}})
    assert release.one("Deployment")["spec"]["progressDeadlineSeconds"] > 3600
    assert "rollout status deployment/demo-baton-gateway --timeout=3600s" in release.notes


def test_without_tls_kubernetes_asks_grpc_itself() -> None:
    (gateway,) = render({"security": {"tls": {"mode": "none"}}}).pods()["gateway"]["spec"]["containers"]
    assert gateway["livenessProbe"]["grpc"] == {"port": 50051}
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_ray_has_probes_of_ours_which_kuberay_leaves_alone() -> None:
    """KubeRay's own probes ask Ray's dashboard, which does not run here."""
    release = render()
    for component, container in (("head", "ray-head"), ("prefill", "ray-worker"), ("decode", "ray-worker")):
        ray = containers(release.pods()[component])[container]
        assert set(ray) >= {"startupProbe", "livenessProbe", "readinessProbe"}
        ports = {port["name"]: port["containerPort"] for port in ray["ports"]}
        assert ray["livenessProbe"]["tcpSocket"]["port"] in ports
    (decode,) = (group for group in release.ray["workerGroupSpecs"] if group["groupName"] == "decode")
    assert str(ports["raylet"]) == decode["rayStartParams"]["node-manager-port"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_ready_once_loaded_and_alive_while_it_has_its_node(role: str) -> None:
    release = render({"metrics": {"port": 9500}})
    worker = containers(release.pods()[role])["ray-worker"]
    probes = {name: worker[name]["tcpSocket"]["port"] for name in worker if name.endswith("Probe")}
    assert probes == {"startupProbe": "raylet", "livenessProbe": "raylet", "readinessProbe": "baton-metrics"}
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert ports["baton-metrics"] == release.fleet_config()["network"]["metrics_port"] == 9500


def test_a_worker_is_reachable_before_it_is_ready() -> None:
    """The controller does not wait for readiness, or no worker would ever load. A pod that is not ready may be
    evicted."""
    release = render({"prefill": {"replicas": 2}, "decode": {"replicas": 2}})
    assert release.one("Service", "-fleet")["spec"]["publishNotReadyAddresses"] is True
    budgets = release.of_kind("PodDisruptionBudget")
    assert {name: item["spec"]["unhealthyPodEvictionPolicy"] for name, item in budgets.items()} == {
        f"demo-baton-{part}": "AlwaysAllow" for part in ("gateway", "prefill", "decode")
    }


def test_the_controller_is_started_again_whatever_the_pods_policy_is() -> None:
    """If Ray's autoscaler runs, KubeRay sets a policy under which containers are not restarted. A native sidecar is
    restarted anyway."""
    (fleet,) = render().pods()["head"]["spec"]["initContainers"]
    assert (fleet["name"], fleet["restartPolicy"]) == ("fleet", "Always")
    assert not set(fleet) & {"startupProbe", "readinessProbe"}, "Ray, which it needs, starts after it"
    assert "livenessProbe" not in fleet, (
        "the control server would count each probe as an unauthenticated peer"
    )


def test_the_controller_finds_ray_and_kuberays_autoscaler_finds_both() -> None:
    head = containers(render(PRODUCTION).pods()["head"])
    shared = [
        {mount["mountPath"]: mount["name"] for mount in head[name]["volumeMounts"]}
        for name in ("ray-head", "fleet")
    ]
    for path, volume in (("/tmp/ray", "ray-logs"), ("/dev/shm", "shared-mem")):
        assert [mounts[path] for mounts in shared] == [volume, volume]


def test_gpus_bring_their_limit_and_their_toleration() -> None:
    pod = render({"decode": {"tensorParallel": 4, "resources": {"limits": {"rdma/hca": 1}}}}).pods()[
        "decode"
    ]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca"]) == (4, 1)
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    without = render({"device": "cpu"}).pods()["decode"]["spec"]
    assert "nvidia.com/gpu" not in without["containers"][0]["resources"]["limits"]
    assert "tolerations" not in without


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({}, {"emptyDir": {}}),
        (
            {"gpu": {"kernelCache": {"persistentVolumeClaim": {"claimName": "kernels"}}}},
            {"persistentVolumeClaim": {"claimName": "kernels"}},
        ),
    ],
    ids=["unset", "a claim"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_compiled_kernels_are_kept_where_the_values_say(role: str, values: Object, source: Object) -> None:
    """The path is the same in every pod: Triton's cache names its files by whole paths."""
    spec = render(values).pods()[role]["spec"]
    (container,) = spec["containers"]
    (path,) = (each["value"] for each in container["env"] if each["name"] == "TRITON_CACHE_DIR")
    assert path == "/var/cache/baton-kernels"
    (volume,) = (each["name"] for each in container["volumeMounts"] if each["mountPath"] == path)
    assert {"name": volume} | source in spec["volumes"]


def test_without_a_gpu_there_are_no_kernels_to_keep() -> None:
    spec = render({"device": "cpu"}).pods()["decode"]["spec"]
    assert "TRITON_CACHE_DIR" not in [each["name"] for each in spec["containers"][0]["env"]]
    assert "kernels" not in [volume["name"] for volume in spec["volumes"]]


NO_PREFILL: dict[str, Any] = {
    "by hand": {"prefill": {"replicas": 0}},
    "by autoscaling": {
        "prefill": {"replicas": 0},
        "autoscaling": {"workers": {"enabled": True, "minPrefill": 0, "maxPrefill": 0}},
    },
}


@pytest.mark.parametrize("how", NO_PREFILL)
def test_without_prefill_workers_their_group_stays_and_has_no_pods(how: str) -> None:
    """KubeRay leaves the pods of a removed group alone; with Recreate, a removed group restarts all pods."""
    prefill, decode = render(NO_PREFILL[how]).ray["workerGroupSpecs"]
    assert (prefill["groupName"], decode["groupName"]) == ("prefill", "decode")
    assert (prefill["replicas"], prefill["minReplicas"], prefill["maxReplicas"]) == (0, 0, 0)
    assert decode["replicas"] == 1


def test_budgets_leave_as_many_as_there_are_at_least_but_one() -> None:
    def budgets(values: Object) -> dict[str, Object]:
        found = render(values).of_kind("PodDisruptionBudget")
        return {name.rpartition("-")[2]: item["spec"] for name, item in found.items()}

    assert set(budgets({})) == {"gateway"}, (
        "with a single worker, a budget would keep a node from being drained for ever"
    )
    many = budgets({"prefill": {"replicas": 2}, "decode": {"replicas": 5}})
    assert (many["prefill"]["minAvailable"], many["decode"]["minAvailable"]) == (1, 4)
    scaled = budgets(
        {"autoscaling": {"workers": {"enabled": True, "minDecode": 3}}, "decode": {"replicas": 5}}
    )
    assert scaled["decode"]["minAvailable"] == 2
    assert (
        budgets({"decode": {"replicas": 5, "podDisruptionBudget": {"minAvailable": 1}}})["decode"][
            "minAvailable"
        ]
        == 1
    )


def test_the_head_has_a_budget_where_asked_for() -> None:
    values = {"rayHead": {"podDisruptionBudget": {"enabled": True}}}
    budget = render(values).one("PodDisruptionBudget", "-head")["spec"]
    assert budget["minAvailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= render().pods()["head"]["metadata"]["labels"].items()


def admitted(policy: Object) -> list[tuple[set[str], set[Any]]]:
    """The admitted components of this release (`*`: all clients), and their ports (`*`: all ports)."""
    rules = []
    for rule in policy["spec"]["ingress"]:
        sources = {
            peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component", "others")
            for peer in rule.get("from", [])
        }
        rules.append((sources or {"*"}, {port["port"] for port in rule.get("ports", [])} or {"*"}))
    return rules


def test_only_the_right_pods_reach_the_planes() -> None:
    policies = {name.rpartition("-")[2]: item for name, item in render().of_kind("NetworkPolicy").items()}
    assert admitted(policies["gateway"]) == [({"*"}, {"grpc", "http"})]
    assert admitted(policies["head"]) == [({"head", "prefill", "decode"}, {"*"}), ({"gateway"}, {6390})]
    for role in ("prefill", "decode"):
        assert admitted(policies[role]) == [({"head", "prefill", "decode", "gateway"}, {"*"})]
    for policy in policies.values():
        for peer in (peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", [])):
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"


def test_prometheus_and_clients_are_admitted_where_they_are_named() -> None:
    policies = {
        name.rpartition("-")[2]: item for name, item in render(PRODUCTION).of_kind("NetworkPolicy").items()
    }
    assert admitted(policies["gateway"]) == [({"others", "test"}, {"grpc", "http"}), ({"others"}, {"http"})]
    assert admitted(policies["decode"])[1:] == [({"others"}, {"baton-metrics"})]


def test_pods_reach_names_each_other_and_what_is_allowed() -> None:
    https = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 443}]}
    release = render({"networkPolicy": {"egress": {"enabled": True, "rules": [https]}}})
    spec = release.of_kind("NetworkPolicy")["demo-baton-egress"]["spec"]
    assert spec["policyTypes"] == ["Egress"]
    names, each_other, allowed = spec["egress"]
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert each_other == {"to": [{"podSelector": spec["podSelector"]}]}
    assert allowed == https
    selected = spec["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in release.pods().values())


def test_values_of_a_chart_from_before_egress_still_render() -> None:
    """`helm upgrade --reuse-values` gives a new chart only the values of the old chart."""
    release = render(
        {"networkPolicy": {"egress": None}, "security": {"metricsKey": None, "testKey": None}},
    )
    assert "demo-baton-egress" not in release.of_kind("NetworkPolicy")


def test_redis_is_ray_heads_memory_where_asked_for() -> None:
    options = render(PRODUCTION).ray["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://redis.example.com:6380"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "redis-password"}
    assert "gcsFaultToleranceOptions" not in render().ray


def test_workers_scale_between_bounds_that_baton_and_ray_share() -> None:
    release = render(PRODUCTION)
    scaling = BatonConfig.from_mapping(release.fleet_config()).autoscaling
    groups = {
        group["groupName"]: (group["minReplicas"], group["maxReplicas"])
        for group in release.ray["workerGroupSpecs"]
    }
    assert scaling.mode == "on"
    assert groups == {
        "prefill": (scaling.min_prefill, scaling.max_prefill),
        "decode": (scaling.min_decode, scaling.max_decode),
    }
    assert scaling.target_ttft_p99_s == 2.0


def test_a_model_of_the_hub_comes_to_each_pod_with_the_token_it_needs() -> None:
    hub = {"tokenSecret": {"name": "mine", "key": "hf"}, "endpoint": "https://mirror.example"}
    release = render({"model": {"path": "acme/tiny@v1:Q8_0", "hub": hub}})
    assert release.fleet_config()["model"]["path"] == "acme/tiny@v1:Q8_0"
    assert '"model": "acme/tiny:Q8_0"' in release.notes
    for pod, container in (
        ("gateway", "gateway"),
        ("head", "fleet"),
        ("prefill", "ray-worker"),
        ("decode", "ray-worker"),
    ):
        variables = {
            variable["name"]: variable for variable in containers(release.pods()[pod])[container]["env"]
        }
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "hf"}
        assert variables["HF_ENDPOINT"]["value"] == "https://mirror.example"
        assert "HF_HOME" not in variables, "in the pod's own home"
        assert "model" not in {volume["name"] for volume in release.pods()[pod]["spec"]["volumes"]}


def test_pods_with_a_claim_share_one_copy_of_a_model_of_the_hub() -> None:
    release = render({"model": {"path": "acme/tiny", "persistentVolumeClaim": {"create": True}}})
    for pod, container in (
        ("gateway", "gateway"),
        ("head", "fleet"),
        ("prefill", "ray-worker"),
        ("decode", "ray-worker"),
    ):
        spec = containers(release.pods()[pod])[container]
        assert {"name": "HF_HOME", "value": "/models/huggingface"} in spec["env"]
        assert {"name": "model", "mountPath": "/models", "readOnly": False} in spec["volumeMounts"]
        (volume,) = [volume for volume in release.pods()[pod]["spec"]["volumes"] if volume["name"] == "model"]
        assert volume["persistentVolumeClaim"]["readOnly"] is False


def test_without_a_model_of_the_hub_no_pod_hears_of_it() -> None:
    for pod in render({}).pods().values():
        names = {variable["name"] for spec in containers(pod).values() for variable in spec.get("env", [])}
        assert not any(name.startswith("HF_") for name in names)


@pytest.mark.parametrize(
    "path",
    ["acme/tiny", "acme/tiny@v1", "a/b:*q4*.gguf", "a/b.gguf", "smollm2", "/models/a", "a/b/c", "a/b@"],
)
def test_the_chart_knows_names_of_the_hub_as_baton_does(path: str) -> None:
    if HubName.parse(path) is not None or path == "smollm2":
        assert render({"model": {"path": path}}).fleet_config()["model"]["path"] == path
    else:
        with pytest.raises(Refused, match=r"no pod has model\.path"):
            render({"model": {"path": path}})
