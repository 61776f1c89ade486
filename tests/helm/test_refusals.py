"""Values that cannot work are refused before anything is made, in words that name them."""

from functools import cache

import pytest

from engine.loading.pretrained import PRETRAINED
from tests.factories.chart import Object, Refused, containers, merged, needs_helm, render

pytestmark = needs_helm

DIGEST = "sha256:" + "a" * 64

Cases = dict[str, tuple[Object, list[str]]]

WRONG: Cases = {
    # What a schema says: where, what it got, what it wants.
    "unknown key": ({"replicaCount": 2}, ["'replicaCount' not allowed"]),
    "unknown key below": ({"prefill": {"replica": 2}}, ["at '/prefill'", "'replica' not allowed"]),
    "negative replicas": ({"prefill": {"replicas": -1}}, ["at '/prefill/replicas'", "got -1, want 0"]),
    "no decode workers": ({"decode": {"replicas": 0}}, ["at '/decode/replicas'", "got 0, want 1"]),
    "replicas in words": (
        {"decode": {"replicas": "two"}},
        ["at '/decode/replicas'", "got string, want integer"],
    ),
    "half a GPU": ({"decode": {"tensorParallel": 0.5}}, ["at '/decode/tensorParallel'", "want integer"]),
    "no GPU": ({"decode": {"tensorParallel": 0}}, ["at '/decode/tensorParallel'", "got 0, want 1"]),
    "a device that is none": ({"device": "tpu"}, ["at '/device'", "'cpu', 'cuda'"]),
    "memory in words": (
        {"decode": {"resources": {"limits": {"memory": "lots"}}}},
        ["at '/decode/resources/limits/memory'", "'lots' does not match"],
    ),
    "resources that are neither": (
        {"gateway": {"resources": {"limit": {"cpu": 1}}}},
        ["at '/gateway/resources'", "'limit' not allowed"],
    ),
    "a port too high": ({"controller": {"port": 70000}}, ["at '/controller/port'", "want 65,535"]),
    "a port of zero": (
        {"gateway": {"httpService": {"port": 0}}},
        ["/gateway/httpService/port", "got 0, want 1"],
    ),
    "a digest that is none": (
        {"image": {"digest": "latest"}},
        ["at '/image/digest'", "'latest' does not match"],
    ),
    "a pull policy that is none": (
        {"image": {"pullPolicy": "Sometimes"}},
        ["/image/pullPolicy", "'IfNotPresent'"],
    ),
    "a name too long": ({"fullnameOverride": "a" * 41}, ["at '/fullnameOverride'", "got 41, want 40"]),
    "a name with capitals": ({"fullnameOverride": "LLM"}, ["at '/fullnameOverride'", "'LLM' does not match"]),
    "a Secret's name": (
        {"security": {"clusterSecret": {"existingSecret": "My Secret"}}},
        ["/security/clusterSecret/existingSecret", "'My Secret' does not match"],
    ),
    "a way to get TLS that is none": (
        {"security": {"tls": {"mode": "yes"}}},
        ["/security/tls/mode", "'generated'"],
    ),
    "a key instead of its hash": (
        {"security": {"apiKeys": {"keys": [{"name": "alice", "key": "sk-1"}]}}},
        ["/security/apiKeys/keys/0", "'key' not allowed"],
    ),
    "no time to drain": ({"drain": {"timeoutSeconds": -5}}, ["/drain/timeoutSeconds", "got -5, want 0"]),
    "an upgrade that is none": (
        {"rayHead": {"upgradeStrategy": "RollingUpdate"}},
        ["/rayHead/upgradeStrategy", "'Recreate'"],
    ),
    "an address to bind that is loopback": ({"bindHost": "127.0.0.1"}, ["at '/bindHost'", "'0.0.0.0', '::'"]),
    "an environment as a mapping": (
        {"gateway": {"extraEnv": {"A": "b"}}},
        ["/gateway/extraEnv", "want array"],
    ),
    "a download without a hash": (
        {"model": {"download": {"files": [{"url": "https://example.com/a"}]}}},
        ["/model/download/files/0", "missing property 'sha256'"],
    ),
    "a download of a path": (
        {
            "model": {
                "download": {"files": [{"url": "https://example.com/a", "sha256": "a" * 64, "name": "../a"}]}
            }
        },
        ["/model/download/files/0/name", "'../a' does not match"],
    ),
    "more than all CPU": (
        {"autoscaling": {"gateway": {"targetCPUUtilizationPercentage": 150}}},
        ["targetCPUUtilizationPercentage", "got 150, want 100"],
    ),
    # What Baton's own configuration says.
    "an unknown section": ({"config": {"schedular": {}}}, ["at '/config'", "'schedular' not allowed"]),
    "an unknown key of Baton": (
        {"config": {"scheduler": {"max_seqs": 1}}},
        ["/config/scheduler", "'max_seqs' not allowed"],
    ),
    "a value that Baton refuses": (
        {"config": {"scheduler": {"policy": "lifo"}}},
        ["/config/scheduler/policy", "'fcfs'"],
    ),
    "a size that Baton refuses": (
        {"config": {"scheduler": {"block_size": 0}}},
        ["/config/scheduler/block_size", "got 0, want 1"],
    ),
    "two volumes for kernels": (
        {"gpu": {"kernelCache": {"emptyDir": {}, "hostPath": {"path": "/kernels"}}}},
        ["/gpu/kernelCache"],
    ),
    "a path for kernels": ({"gpu": {"kernelCache": "/kernels"}}, ["/gpu/kernelCache"]),
}

CONTRADICTIONS: Cases = {
    "a key that the chart sets": (
        {"config": {"network": {"bind_host": "::"}}},
        ["config.network.bind_host: the chart sets this by itself; set bindHost instead"],
    ),
    "another of them": (
        {"config": {"gateway": {"grpc_port": 1}}},
        ["config.gateway.grpc_port: the chart sets this by itself; set gateway.grpcService.port instead"],
    ),
    "two stores of responses": (
        {
            "config": {"gateway": {"response_store": "none"}},
            "gateway": {"responseStore": {"existingSecret": "store"}},
        },
        ["config.gateway.response_store and gateway.responseStore.existingSecret both name a store"],
    ),
    "ranks that do not divide": (
        {"prefill": {"tensorParallel": 2}, "decode": {"tensorParallel": 3}},
        ["prefill.tensorParallel (2) and decode.tensorParallel (3): one must be a multiple of the other"],
    ),
    "gateways' bounds": (
        {"autoscaling": {"gateway": {"enabled": True, "minReplicas": 9}}},
        ["autoscaling.gateway.minReplicas (9) must not be above maxReplicas (8)"],
    ),
    "workers out of bounds": (
        {"autoscaling": {"workers": {"enabled": True}}, "decode": {"replicas": 20}},
        ["decode.replicas (20) must be between autoscaling.workers.minDecode (1) and maxDecode (8)"],
    ),
    "bounds without room": (
        {"autoscaling": {"workers": {"enabled": True, "maxPrefill": 1, "maxDecode": 1}}},
        ["its bounds leave nothing to change"],
    ),
    "targets without autoscaling": (
        {"autoscaling": {"workers": {"config": {"interval_s": 1.0}}}},
        ["autoscaling.workers.config needs autoscaling.workers.enabled: true"],
    ),
    "autoscaling without pods for it": (
        {"config": {"autoscaling": {"mode": "on", "max_decode": 4}}},
        ["config.autoscaling.mode: with 'on', pods", "autoscaling.workers.enabled: true; set that instead"],
    ),
    "ranks that every role has already": (
        {"config": {"engine": {"tensor_parallel": 4}}},
        [
            "config.engine.tensor_parallel: the chart sets",
            "set prefill.tensorParallel and decode.tensorParallel",
        ],
    ),
    "TLS without its Secret": (
        {"security": {"tls": {"mode": "existingSecret"}}},
        ["security.tls.mode existingSecret needs security.tls.existingSecret"],
    ),
    "TLS's Secret without its mode": (
        {"security": {"tls": {"existingSecret": "mine"}}},
        ["security.tls.existingSecret (mine) needs security.tls.mode existingSecret, not generated"],
    ),
    "cert-manager without an issuer": (
        {"security": {"tls": {"mode": "certManager"}}},
        ["security.tls.mode certManager needs security.tls.issuerRef"],
    ),
    "an issuer without cert-manager": (
        {"security": {"tls": {"issuerRef": {"name": "mine"}}}},
        ["security.tls.issuerRef needs security.tls.mode certManager, not generated"],
    ),
    "names for no certificate": (
        {"security": {"tls": {"mode": "none", "extraNames": ["a.example.com"]}}},
        ["security.tls.extraNames are for certificates that the chart asks for; mode is none"],
    ),
    "a generated certificate of a public authority": (
        {"security": {"tls": {"hasAuthority": False}}},
        ["security.tls.hasAuthority: false is for modes existingSecret and certManager, not generated"],
    ),
    "a certificate of a public authority by no name": (
        {"security": {"tls": {"mode": "existingSecret", "existingSecret": "mine", "hasAuthority": False}}},
        ["security.tls.hasAuthority: false with mode existingSecret needs security.tls.serverName"],
    ),
    "a certificate without names": (
        {"security": {"tls": {"mode": "certManager", "issuerRef": {"name": "a"}, "internalNames": False}}},
        ["security.tls.internalNames: false needs security.tls.mode certManager", "and extraNames"],
    ),
    "a name that is not in the certificate": (
        {"security": {"tls": {"serverName": "llm.example.com", "extraNames": ["*.example.org"]}}},
        ["security.tls.serverName (llm.example.com) is not in the certificate", "add it to extraNames"],
    ),
    "two sources of keys": (
        {"security": {"apiKeys": {"existingSecret": "mine", "keys": [{"name": "a", "sha256": "b" * 64}]}}},
        ["security.apiKeys: existingSecret and keys are two sources"],
    ),
    "two sources of the administrator's key": (
        {"security": {"apiKeys": {"existingSecret": "mine", "adminSha256": "b" * 64}}},
        ["security.apiKeys: existingSecret and adminSha256 are two sources"],
    ),
    "Prometheus without a key": (
        {
            "security": {"apiKeys": {"existingSecret": "mine"}},
            "metrics": {"serviceMonitor": {"enabled": True}},
        },
        ["metrics.serviceMonitor", "security.metricsKey.existingSecret"],
    ),
    "the administrator's key itself": (
        {"security": {"apiKeys": {"adminSha256": "baton-key"}}},
        ["/security/apiKeys/adminSha256"],
    ),
    "fault tolerance without Redis": (
        {"rayHead": {"gcsFaultTolerance": {"enabled": True}}},
        ["rayHead.gcsFaultTolerance.enabled needs redisAddress"],
    ),
    "Redis without fault tolerance": (
        {"rayHead": {"gcsFaultTolerance": {"redisAddress": "redis://r:6379"}}},
        ["redisAddress and existingSecret need enabled: true"],
    ),
    "two volumes": (
        {"model": {"existingClaim": "mine", "path": "/models/a", "persistentVolumeClaim": {"create": True}}},
        ["model: existingClaim and persistentVolumeClaim.create exclude one another"],
    ),
    "a model beside its volume": (
        {"model": {"existingClaim": "mine", "path": "/weights/a"}},
        ["model.path (/weights/a) must be a folder below model.mountPath (/models)"],
    ),
    "a model that is nowhere": (
        {"model": {"path": "/models/mine"}},
        ["model.path (/models/mine) is nowhere: set model.existingClaim", "or model.inImage: true"],
    ),
    "a model by a name that nobody knows": ({"model": {"path": "llama"}}, ["model.path (llama) is nowhere"]),
    "a model of the Hub that is downloaded twice": (
        {
            "model": {
                "path": "acme/tiny",
                "download": {"files": [{"url": "https://a.b/c", "sha256": "a" * 64}]},
            }
        },
        ["model.path (acme/tiny) is a model of the Hub", "remove model.download.files"],
    ),
    "a token for no model of the Hub": (
        {"model": {"hub": {"tokenSecret": {"name": "mine"}}}},
        ["model.hub is for a model of the Hub, ORG/NAME; model.path is smollm2"],
    ),
    "a model of the Hub in the image": (
        {"model": {"path": "acme/tiny", "inImage": True}},
        ["model.inImage: model.path (acme/tiny) must be a folder, beginning with /"],
    ),
    "a model in the image and on a claim": (
        {"model": {"path": "/models/mine", "inImage": True, "existingClaim": "weights"}},
        ["model.inImage: model.path (/models/mine) must be a folder", "no claim or download beside it"],
    ),
    "a name in the image": (
        {"model": {"inImage": True}},
        ["model.inImage: model.path (smollm2) must be a folder, beginning with /"],
    ),
    "metrics where the raylet is": (
        {"metrics": {"port": 6380}},
        ["metrics.port (6380) is a port that Ray takes in the same pod; choose another one, such as 9400"],
    ),
    "metrics among Ray's workers": ({"metrics": {"port": 12000}}, ["metrics.port (12000) is a port that"]),
    "a controller where Ray's head is": (
        {"controller": {"port": 6379}},
        ["controller.port (6379) is a port that Ray takes in the same pod; choose another one, such as 6390"],
    ),
    "a label by which pods are found": (
        {"gateway": {"podLabels": {"app.kubernetes.io/component": "frontend"}}},
        ["gateway.podLabels: by app.kubernetes.io/component Services and policies find their pods"],
    ),
    "a label of KubeRay": (
        {"decode": {"podLabels": {"ray.io/node-type": "head"}}},
        ["decode.podLabels: by ray.io/node-type"],
    ),
    "a budget that no node gets past": (
        {"decode": {"replicas": 3, "podDisruptionBudget": {"minAvailable": 3}}},
        ["decode.podDisruptionBudget.minAvailable (3) must be below the 3 workers that there are at least"],
    ),
    "a budget above what autoscaling leaves": (
        {
            "decode": {"replicas": 3, "podDisruptionBudget": {"minAvailable": 2}},
            "autoscaling": {"workers": {"enabled": True, "minDecode": 2}},
        },
        ["decode.podDisruptionBudget.minAvailable (2) must be below the 2 workers that there are at least"],
    ),
    "clients without Prometheus": (
        {
            "networkPolicy": {"clients": [{"podSelector": {}}]},
            "metrics": {"serviceMonitor": {"enabled": True}},
        },
        ["networkPolicy.clients shuts out Prometheus", "set networkPolicy.prometheus, such as"],
    ),
    "clients of no policy": (
        {"networkPolicy": {"enabled": False, "clients": [{"podSelector": {}}]}},
        ["networkPolicy: clients, prometheus and egress.enabled need enabled: true"],
    ),
    "rules for a policy that there is not": (
        {"networkPolicy": {"egress": {"rules": [{"ports": [{"port": 443}]}]}}},
        ["networkPolicy.egress.rules need networkPolicy.egress.enabled: true"],
    ),
    "a GGUF file that no download brings": (
        {
            "model": {
                "path": "/models/tiny.gguf",
                "download": {"files": [{"url": "https://a.b/tiny.gguf?x=1", "sha256": "a" * 64}]},
            }
        },
        ["model.path (/models/tiny.gguf) is a GGUF file", "set its name to tiny.gguf"],
    ),
}


def leaves(values: Object, path: str = "") -> set[str]:
    """Where something is set."""
    found: set[str] = set()
    for key, value in values.items():
        found |= leaves(value, f"{path}/{key}") if isinstance(value, dict) and value else {f"{path}/{key}"}
    return found


@cache
def said_of_wrong_values() -> dict[str, str]:
    """What helm says in each case. It tells of all wrong values at once: cases with nothing in common share a run."""
    together: list[tuple[Object, list[str]]] = []
    for case, (values, _) in WRONG.items():
        for shared, cases in together:
            if not leaves(shared) & leaves(values):
                shared.update(merged(shared, values))
                cases.append(case)
                break
        else:
            together.append((dict(values), [case]))
    return {case: refusal(values) for values, cases in together for case in cases}


def refusal(values: Object) -> str:
    with pytest.raises(Refused) as refused:
        render(values)
    return str(refused.value)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    assert [words for words in WRONG[case][1] if words not in said_of_wrong_values()[case]] == []


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(case: str) -> None:
    values, expected = CONTRADICTIONS[case]
    said = refusal(values)
    assert [words for words in expected if words not in said] == []


PARTS = {"gateway": "gateway", "head": "rayHead", "prefill": "prefill", "decode": "decode"}


def test_no_variable_that_the_chart_sets_is_set_twice() -> None:
    own = {
        (component, variable["name"])
        for component, pod in render().pods().items()
        for container in containers(pod).values()
        for variable in container.get("env", [])
    }
    assert {("head", "RAY_AUTH_TOKEN"), ("decode", "POD_IP"), ("gateway", "BATON_CLUSTER_SECRET")} <= own
    for component, name in sorted(own):
        said = refusal({PARTS[component]: {"extraEnv": [{"name": name, "value": "mine"}]}})
        assert f"{PARTS[component]}.extraEnv: the chart sets {name} by itself; take it out" in said


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_model_that_baton_knows_by_name_needs_no_volume(name: str) -> None:
    assert render({"model": {"path": name}}).fleet_config()["model"]["path"] == name


def test_there_is_no_refusal_without_a_reason() -> None:
    render({"image": {"digest": DIGEST}, "config": {"scheduler": {"policy": "priority"}}})
    render({"config": {"autoscaling": {"mode": "dry_run"}, "engine": {"enable_expert_parallel": False}}})
    render({"model": {"path": "/opt/mine", "inImage": True}})
    render({"gateway": {"podLabels": {"app.kubernetes.io/part-of": "llm"}, "extraEnv": [{"name": "TZ"}]}})
    render({"decode": {"replicas": 3, "podDisruptionBudget": {"enabled": False, "minAvailable": 3}}})
