"""Values that values.schema.json refuses, in words that name them."""

from functools import cache

import pytest

from tests.factories.chart import Object, merged, needs_helm, refusal

pytestmark = needs_helm

WRONG: dict[str, tuple[Object, list[str]]] = {
    # A message about the schema: the place, the value, and the allowed values.
    "unknown key": ({"replicaCount": 2}, ["'replicaCount' not allowed"]),
    "unknown key below": ({"prefill": {"replica": 2}}, ["at '/prefill'", "'replica' not allowed"]),
    "a section whose keys are all comments": (
        {"serviceAccounts": None},
        ["missing property 'serviceAccounts'"],
    ),
    "a section below": ({"metrics": {"podMonitor": None}}, ["at '/metrics': missing property 'podMonitor'"]),
    "a key without its number": (
        {"gateway": {"preStopSleepSeconds": None}},
        ["at '/gateway': missing property 'preStopSleepSeconds'"],
    ),
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
    "a time of a year": (
        {"config": {"cluster": {"stable_after_s": 3e7}}, "controller": {"startTimeoutSeconds": 30_000_000}},
        ["/config/cluster/stable_after_s", "/controller/startTimeoutSeconds", "maximum: got"],
    ),
    "a port too high": ({"controller": {"port": 70000}}, ["at '/controller/port'", "want 65,535"]),
    "a port of zero": (
        {"gateway": {"httpService": {"port": 0}}},
        ["/gateway/httpService/port", "got 0, want 1"],
    ),
    "a repository with its tag": (
        {"image": {"repository": "registry.example.com:5000/baton:1"}},
        ["at '/image/repository'", "does not match"],
    ),
    "a budget of nothing": (
        {"gateway": {"podDisruptionBudget": {"maxUnavailable": "0%"}}},
        ["/gateway/podDisruptionBudget/maxUnavailable", "'0%' does not match"],
    ),
    "a claim for kernels by another key": (
        {"gpu": {"kernelCache": {"persistentVolumeClaim": {"name": "kernels"}}}},
        ["/gpu/kernelCache/persistentVolumeClaim", "missing property 'claimName'"],
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
    "a URL in the certificate": (
        {"security": {"tls": {"extraNames": ["https://llm.example.com"]}}},
        ["/security/tls/extraNames/0", "'https://llm.example.com' does not match"],
    ),
    "part of an address in the certificate": (
        {"security": {"tls": {"extraNames": ["10.0.0.7", "1.2.3"]}}},
        ["/security/tls/extraNames/1", "'1.2.3' does not match"],
    ),
    "a URL as a certificate's name": (
        {"security": {"tls": {"serverName": "https://llm.example.com"}}},
        ["/security/tls/serverName", "'https://llm.example.com' does not match"],
    ),
    "a certificate for more days than Go can count": (
        {"security": {"tls": {"validDays": 106752}}},
        ["/security/tls/validDays", "got 106,752, want 36,500"],
    ),
    "a key instead of its hash": (
        {"security": {"apiKeys": {"keys": [{"name": "alice", "key": "sk-1"}]}}},
        ["/security/apiKeys/keys/0", "'key' not allowed"],
    ),
    "a hash with capitals": (
        {"security": {"apiKeys": {"adminSha256": "A" * 64}}},
        ["/security/apiKeys/adminSha256", "does not match"],
    ),
    "a key's hash with capitals": (
        {"security": {"apiKeys": {"keys": [{"name": "alice", "sha256": "A" * 64}]}}},
        ["/security/apiKeys/keys/0/sha256", "does not match"],
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
    "a URL with a blank": (
        {"model": {"download": {"files": [{"url": "https://example.com/a b", "sha256": "a" * 64}]}}},
        ["/model/download/files/0/url", "'https://example.com/a b' does not match"],
    ),
    "a volume for one pod": (
        {"model": {"persistentVolumeClaim": {"accessModes": ["ReadWriteOncePod"]}}},
        ["/model/persistentVolumeClaim/accessModes/0", "'ReadWriteMany'"],
    ),
    "a scrape every zero seconds": (
        {"metrics": {"serviceMonitor": {"interval": "0s"}}},
        ["/metrics/serviceMonitor/interval", "'0s' does not match"],
    ),
    "more than all CPU": (
        {"autoscaling": {"gateway": {"targetCPUUtilizationPercentage": 150}}},
        ["targetCPUUtilizationPercentage", "got 150, want 100"],
    ),
    # Messages of Baton's own configuration.
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
}


def leaves(values: Object, path: str = "") -> set[str]:
    """Where something is set."""
    found: set[str] = set()
    for key, value in values.items():
        found |= leaves(value, f"{path}/{key}") if isinstance(value, dict) and value else {f"{path}/{key}"}
    return found


@cache
def said_of_wrong_values() -> dict[str, str]:
    """The message of helm in each case. helm reports all wrong values at once, so cases with nothing in common
    share a run."""
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


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    assert [words for words in WRONG[case][1] if words not in said_of_wrong_values()[case]] == []
