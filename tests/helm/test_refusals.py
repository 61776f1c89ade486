"""Values that contradict one another are refused before anything is made, in words that name them."""

import hashlib

import pytest

from baton.fleet import MAX_DRAIN_NODE_S
from engine.loading.pretrained import PRETRAINED
from tests.factories.chart import Object, needs_helm, refusal, render

pytestmark = needs_helm

DIGEST = "sha256:" + "a" * 64

PUBLIC: Object = {"mode": "certManager", "issuerRef": {"name": "a"}, "internalNames": False}

CONTRADICTIONS: dict[str, tuple[Object, list[str]]] = {
    "a key that the chart sets": (
        {"config": {"network": {"bind_host": "::"}}},
        ["config.network.bind_host: the chart sets this by itself; set bindHost instead"],
    ),
    "another of them": (
        {"config": {"gateway": {"grpc_port": 1}}},
        ["config.gateway.grpc_port: the chart sets this by itself; set gateway.grpcService.port instead"],
    ),
    "a key without another value": (
        {"config": {"cluster": {"ray_address": "auto"}}},
        ["config.cluster.ray_address: the chart sets this by itself; remove it"],
    ),
    "one address for all pods": (
        {"config": {"network": {"advertise_host": "1.2.3.4"}}},
        ["config.network.advertise_host: is wrong in the pods of the chart; remove it"],
    ),
    "a secret in a file": (
        {"config": {"network": {"secret_file": "/tmp/secret"}}},
        [
            "config.network.secret_file: is wrong in the pods",
            "set security.clusterSecret.existingSecret instead",
        ],
    ),
    "hand-overs from no worker": (
        {"config": {"gateway": {"require_disaggregated": True}}, "prefill": {"replicas": 0}},
        ["config.gateway.require_disaggregated: without a prefill worker", "raise prefill.replicas (0)"],
    ),
    "hand-overs from workers that may all go": (
        {
            "config": {"gateway": {"require_disaggregated": True}},
            "autoscaling": {"workers": {"enabled": True, "minPrefill": 0}},
        },
        ["config.gateway.require_disaggregated", "raise autoscaling.workers.minPrefill (0)"],
    ),
    "a drain that the command would refuse": (
        {"drain": {"timeoutSeconds": int(MAX_DRAIN_NODE_S) - 23}},
        [
            "drain: timeoutSeconds (3577), leaseSeconds (10), unresponsiveSeconds (10) and 4",
            f"are 3601; `baton drain` takes at most {MAX_DRAIN_NODE_S:.0f}",
        ],
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
    "a target in two places": (
        {
            "autoscaling": {"workers": {"enabled": True, "config": {"target_ttft_p99_s": 2.0}}},
            "config": {"autoscaling": {"target_ttft_p99_s": 3.0}},
        },
        [
            "config.autoscaling.target_ttft_p99_s: autoscaling.workers.config has the same key; remove one of the two"
        ],
    ),
    "autoscaling without pods for it": (
        {"config": {"autoscaling": {"mode": "on", "max_decode": 4}}},
        [
            "config.autoscaling.mode: with 'on', the chart makes pods",
            "autoscaling.workers.enabled: true; set autoscaling.workers.enabled instead",
        ],
    ),
    "ranks that every role has already": (
        {"config": {"engine": {"tensor_parallel": 4}}},
        [
            "config.engine.tensor_parallel: is wrong in the pods",
            "set prefill.tensorParallel and decode.tensor",
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
        ["security.tls.extraNames are only for modes generated and certManager, not none"],
    ),
    "a generated certificate of a public authority": (
        {"security": {"tls": {"hasAuthority": False}}},
        ["security.tls.hasAuthority: false is only for modes existingSecret and certManager, not generated"],
    ),
    "a certificate of a public authority by no name": (
        {"security": {"tls": {"mode": "existingSecret", "existingSecret": "mine", "hasAuthority": False}}},
        ["security.tls.hasAuthority: false with mode existingSecret needs security.tls.serverName"],
    ),
    "a certificate without names": (
        {"security": {"tls": PUBLIC}},
        ["security.tls.internalNames: false needs security.tls.mode certManager", "and extraNames"],
    ),
    "a wildcard as the name to verify": (
        {"security": {"tls": PUBLIC | {"extraNames": ["*.a.com"]}}},
        [
            "security.tls.extraNames: clients cannot connect to the first name (*.a.com), which is a wildcard",
            "set security.tls.serverName",
        ],
    ),
    "a name that is not in the certificate": (
        {"security": {"tls": {"serverName": "llm.example.com", "extraNames": ["*.example.org"]}}},
        [
            "security.tls.serverName (llm.example.com) is not in the certificate",
            "add this name to extraNames",
        ],
    ),
    "two sources of keys": (
        {"security": {"apiKeys": {"existingSecret": "mine", "keys": [{"name": "a", "sha256": "b" * 64}]}}},
        ["security.apiKeys: existingSecret and keys cannot be used together"],
    ),
    "two sources of the administrator's key": (
        {"security": {"apiKeys": {"existingSecret": "mine", "adminSha256": "b" * 64}}},
        ["security.apiKeys: existingSecret and adminSha256 cannot be used together"],
    ),
    "the hash of no key": (
        {"security": {"apiKeys": {"adminSha256": hashlib.sha256(b"").hexdigest()}}},
        ["security.apiKeys: adminSha256 has the sha256 of an empty key; is the variable set"],
    ),
    "a key by two names": (
        {"security": {"apiKeys": {"keys": [{"name": name, "sha256": "b" * 64} for name in "ab"]}}},
        ["security.apiKeys: b has the sha256 of a"],
    ),
    "a key by the name of the chart's own": (
        {"security": {"apiKeys": {"keys": [{"name": "helm-test", "sha256": "b" * 64}]}}},
        ["security.apiKeys.keys: Baton or the chart itself has a key with the name helm-test"],
    ),
    "two keys of a caller with other rights": (
        {
            "security": {
                "apiKeys": {
                    "keys": [
                        {"name": "a", "sha256": "b" * 64},
                        {"name": "a", "sha256": "c" * 64, "max_concurrent": 1},
                    ]
                }
            }
        },
        ["security.apiKeys.keys: two keys have the name a, but differ in more than their sha256"],
    ),
    "Prometheus without a key": (
        {
            "security": {"apiKeys": {"existingSecret": "mine"}},
            "metrics": {"serviceMonitor": {"enabled": True}},
        },
        ["metrics.serviceMonitor", "security.metricsKey.existingSecret"],
    ),
    "a key of Prometheus that gateways refuse": (
        {
            "security": {
                "metricsKey": {"existingSecret": "mine"},
                "apiKeys": {"adminSha256": "a" * 64, "keys": [{"name": "a", "sha256": "b" * 64}]},
            }
        },
        [
            "security.metricsKey.existingSecret (mine): no entry of security.apiKeys.keys has the scope observe"
        ],
    ),
    "a key of helm test that gateways refuse": (
        {"security": {"testKey": {"existingSecret": "mine"}}},
        ["security.testKey.existingSecret (mine): no entry of security.apiKeys.keys has the scope generate"],
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
        ["model: existingClaim and persistentVolumeClaim.create cannot be used together"],
    ),
    "a model beside its volume": (
        {"model": {"existingClaim": "mine", "path": "/weights/a"}},
        ["model.path (/weights/a) must be a folder below model.mountPath (/models)"],
    ),
    "a model that only seems to be below": (
        {"model": {"existingClaim": "mine", "path": "/models/../etc"}},
        ["model.path (/models/../etc) must be a folder below model.mountPath (/models)"],
    ),
    "two volumes in one place": (
        {"model": {"existingClaim": "mine", "mountPath": "/tmp", "path": "/tmp/mine"}},
        ["model.mountPath (/tmp): pods have another volume at /tmp; choose another folder, such as /models"],
    ),
    "a volume around another one": (
        {"model": {"existingClaim": "mine", "mountPath": "/home", "path": "/home/mine"}},
        ["model.mountPath (/home): pods have another volume at /home/baton"],
    ),
    "a volume over the image's programs": (
        {"model": {"existingClaim": "mine", "mountPath": "/usr", "path": "/usr/mine"}},
        ["model.mountPath (/usr): the volume would hide files of the image in /usr/bin"],
    ),
    "a volume within the image's programs": (
        {"model": {"existingClaim": "mine", "mountPath": "/opt/baton/bin", "path": "/opt/baton/bin/mine"}},
        ["model.mountPath (/opt/baton/bin): the volume would hide files of the image in /opt/baton"],
    ),
    "a volume in one that is read-only": (
        {"model": {"existingClaim": "mine", "mountPath": "/etc/baton/m", "path": "/etc/baton/m/mine"}},
        ["model.mountPath (/etc/baton/m): pods have another volume at"],
    ),
    "a model that is nowhere": (
        {"model": {"path": "/models/mine"}},
        ["no pod has model.path (/models/mine): set model.existingClaim", "or model.inImage: true"],
    ),
    "a model in an object store": (
        {"model": {"path": "s3://bucket/mine"}},
        ["model.path (s3://bucket/mine): the image has no client for object stores", "model.existingClaim"],
    ),
    "a draft model in an object store": (
        {"config": {"speculation": {"method": "draft_model", "draft_model": "gs://bucket/small"}}},
        ["config.speculation.draft_model (gs://bucket/small): the image has no client for object stores"],
    ),
    "a model by a name that nobody knows": ({"model": {"path": "llama"}}, ["no pod has model.path (llama)"]),
    "a token for no model of the Hub": (
        {"model": {"hub": {"tokenSecret": {"name": "mine"}}}},
        ["model.hub is only for a model of the Hub (ORG/NAME), but model.path is smollm2"],
    ),
    "a model of the Hub in the image": (
        {"model": {"path": "acme/tiny", "inImage": True}},
        ["model.inImage: model.path (acme/tiny) must be a folder, beginning with /"],
    ),
    "a model in the image and on a claim": (
        {"model": {"path": "/models/mine", "inImage": True, "existingClaim": "weights"}},
        ["model.inImage: model.path (/models/mine) must be a folder", "no claim and no download"],
    ),
    "a name in the image": (
        {"model": {"inImage": True}},
        ["model.inImage: model.path (smollm2) must be a folder, beginning with /"],
    ),
    "metrics where the raylet is": (
        {"metrics": {"port": 6380}},
        ["metrics.port (6380) is a port that Ray uses in the same pod; choose another one, such as 9400"],
    ),
    "metrics among Ray's workers": ({"metrics": {"port": 12000}}, ["metrics.port (12000) is a port that"]),
    "a controller where Ray's head is": (
        {"controller": {"port": 6379}},
        ["controller.port (6379) is a port that Ray uses in the same pod; choose another one, such as 6390"],
    ),
    "a label by which pods are found": (
        {"gateway": {"podLabels": {"app.kubernetes.io/component": "frontend"}}},
        ["gateway.podLabels: the label app.kubernetes.io/component is reserved"],
    ),
    "an annotation of the chart": (
        {"rayHead": {"podAnnotations": {"checksum/fleet-config": "1"}}},
        ["rayHead.podAnnotations: the chart sets checksum/fleet-config by itself; remove it"],
    ),
    "a label of the chart": (
        {"metrics": {"podMonitor": {"enabled": True, "labels": {"app.kubernetes.io/name": "mine"}}}},
        ["metrics.podMonitor.labels: the chart sets app.kubernetes.io/name by itself; remove it"],
    ),
    "a label of KubeRay": (
        {"decode": {"podLabels": {"ray.io/node-type": "head"}}},
        ["decode.podLabels: the label ray.io/node-type"],
    ),
    "GPUs in another place": (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 4}}}},
        ["decode.resources: the chart sets nvidia.com/gpu by itself; set decode.tensorParallel instead"],
    ),
    "a request above its limit": (
        {"prefill": {"resources": {"requests": {"memory": "0.05Ti"}}}},
        ["prefill.resources.requests.memory (0.05Ti) is above its limit (32Gi); raise both"],
    ),
    "memory without a unit": (
        {"decode": {"resources": {"limits": {"memory": 32}}}},
        ["decode.resources.limits.memory (32) is less than 64Mi"],
    ),
    "a share of no CPU": (
        {
            "autoscaling": {"gateway": {"enabled": True}},
            "gateway": {"resources": {"requests": {"cpu": None}}},
        },
        [
            "autoscaling.gateway.enabled scales by shares of gateway.resources.requests.cpu; set gateway.resources"
        ],
    ),
    "a budget that no node gets past": (
        {"decode": {"replicas": 3, "podDisruptionBudget": {"minAvailable": 3}}},
        ["decode.podDisruptionBudget.minAvailable (3) must be below the smallest number of workers, 3"],
    ),
    "a budget above what autoscaling leaves": (
        {
            "decode": {"replicas": 3, "podDisruptionBudget": {"minAvailable": 2}},
            "autoscaling": {"workers": {"enabled": True, "minDecode": 2}},
        },
        ["decode.podDisruptionBudget.minAvailable (2) must be below the smallest number of workers, 2"],
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
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(case: str) -> None:
    values, expected = CONTRADICTIONS[case]
    said = refusal(values)
    assert [words for words in expected if words not in said] == []


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_model_that_baton_knows_by_name_needs_no_volume(name: str) -> None:
    assert render({"model": {"path": name}}).fleet_config()["model"]["path"] == name


def test_there_is_no_refusal_without_a_reason() -> None:
    image = {"repository": "localhost:5000/a/baton__2", "digest": DIGEST}
    render({"image": image, "config": {"scheduler": {"policy": "priority"}}})
    render({"config": {"autoscaling": {"mode": "dry_run"}, "engine": {"enable_expert_parallel": False}}})
    render({"model": {"path": "/opt/mine", "inImage": True}})
    as_limited = {"resources": {"requests": {"memory": 34359738368}}}
    small = {"resources": {"requests": {"memory": "0"}, "limits": {"memory": "1Gi"}}}
    below = {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 2}}}
    render({"prefill": {"resources": None}, "decode": as_limited, "gateway": below, "rayHead": small})
    render({"security": {"apiKeys": {"keys": None}}, "gateway": {"responseStore": None, "podLabels": None}})
    for_redis = {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"}
    render({"decode": {"extraEnv": [for_redis]}})
    two = [{"name": "admin", "sha256": digit * 64, "scopes": ["administer"]} for digit in "bc"]
    render({"security": {"apiKeys": {"keys": two}}})
    render(
        {"gateway": {"podLabels": {"app.kubernetes.io/part-of": "llm"}, "extraEnv": [{"name": "HF_TOKEN"}]}}
    )
    render({"decode": {"replicas": 3, "podDisruptionBudget": {"enabled": False, "minAvailable": 3}}})
