"""The chart's facts about Baton agree with Baton itself, and with the files for `ray up`."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import BatonConfig
from baton.worker import WorkerRole
from cli.main import build_parser
from scripts import chart
from tests.factories.chart import ROOT, VALUES_OF_CI, Object, Release, containers, needs_helm, render

every_cluster = pytest.mark.parametrize(
    "values", VALUES_OF_CI, ids=lambda path: path.name.removesuffix("-values.yaml")
)


def test_readme_schema_and_copies_are_up_to_date() -> None:
    stale = [
        path.name
        for path, text in chart.generated_files().items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run python -m scripts.chart"


def test_every_value_stands_in_the_readme_and_in_the_schema() -> None:
    values = yaml.safe_load(chart.VALUES.read_text())
    schema = json.loads(chart.SCHEMA.read_text())
    named = {value.key for chapter in chart.read_values(chart.VALUES.read_text()) for value in chapter.values}
    assert {key.partition(".")[0] for key in named} == set(values)
    assert set(values) <= set(schema["properties"])


def test_a_value_has_the_comment_that_stands_above_it() -> None:
    text = "# ---- Gateway ---\n# of others\n\na:\n  # not this\n  # -- How many,\n  # at most.\n  b: 1\n  c: {d: 2}\n"
    (chapter,) = chart.read_values(text)
    found = [(value.key, value.default, value.meaning) for value in chapter.values]
    assert (chapter.title, found) == (
        "Gateway",
        [("a.b", "1", "How many, at most."), ("a.c", '{"d": 2}', "")],
    )


@needs_helm
@every_cluster
def test_baton_accepts_every_key_that_the_chart_renders(values: Path) -> None:
    release = render(values)
    fleet = BatonConfig.from_mapping(release.fleet_config())
    gateway = BatonConfig.from_mapping(release.gateway_config())
    assert gateway.cluster.name == fleet.cluster.name
    assert gateway.cluster.fleet_address == f"{fleet.cluster.name}-fleet:{fleet.cluster.fleet_port}"


@needs_helm
def test_the_check_of_the_page_finds_keys_that_contradict_one_another() -> None:
    (program,) = re.findall(
        r"python3 -c '\n(.*?)'\n```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL
    )
    said = []
    for config in ({}, {"gateway": {"trace_sample_ratio": 0.5}}):
        rendered = yaml.dump_all(render({"config": config}).of_kind("ConfigMap").values())
        done = subprocess.run(
            [sys.executable, "-c", program], input=rendered, capture_output=True, text=True, cwd=ROOT
        )
        said.append(done.stderr.strip().rpartition("\n")[2])
    assert said[0] == ""
    assert "gateway.yaml: gateway: trace_sample_ratio (0.5) needs an otlp_endpoint" in said[1]


@needs_helm
def test_what_the_chart_passes_on_is_passed_on() -> None:
    config: Object = {
        "scheduler": {"max_num_seqs": 7},
        "gateway": {"max_queued": 3, "max_in_flight": 500},
        "logging": {"level": "info"},
    }
    release = render({"config": config})
    fleet, gateway = release.fleet_config(), release.gateway_config()
    assert fleet["scheduler"] == {"max_num_seqs": 7}
    assert (gateway["gateway"]["max_queued"], gateway["gateway"]["max_in_flight"]) == (3, 500)
    assert fleet["gateway"] == {"max_in_flight": 500}, "the length of the workers' queues"
    assert fleet["logging"] == gateway["logging"] == {"level": "info"}
    assert "gateway" not in render({"config": {"gateway": {"max_queued": 3}}}).fleet_config()
    assert "scheduler" not in gateway


@needs_helm
def test_every_key_that_the_chart_sets_names_the_value_to_use_instead() -> None:
    text = (chart.CHART / "templates" / "_config.tpl").read_text()
    instead = set(re.findall(r"^([a-z_]+\.[a-z_]+): ", text.partition("baton.instead")[2], re.MULTILINE))
    scaled = render({"autoscaling": {"workers": {"enabled": True}}})
    own = {
        f"{section}.{key}"
        for config in (
            scaled.fleet_config(),
            scaled.gateway_config(),
            render({"security": {"tls": {"mode": "none"}}}).gateway_config(),
            render({"gateway": {"responseStore": {"existingSecret": "store"}}}).gateway_config(),
        )
        for section, keys in config.items()
        for key in keys
    }
    fixed = {
        "cluster.ray_address",
        "cluster.ray_timeout_s",
        "cluster.fleet_address",
        "cluster.cpus_per_worker",
        "cluster.prefill_resources",
        "cluster.decode_resources",
    }
    assert instead - own == {"engine.tensor_parallel", "network.secret_file"}, "never right in a pod"
    assert own - instead == fixed, "these follow from how the chart is built"


@needs_helm
@every_cluster
def test_commands_and_flags_exist(values: Path) -> None:
    parser = build_parser()
    commands = {tuple(command) for command in commands_of(render(values)) if command[0] == "baton"}
    assert {command[1] for command in commands} == {"fleet", "gateway", "drain", "generate"}
    for command in commands:
        parser.parse_args(command[1:])


def commands_of(release: Release) -> list[list[str]]:
    """The commands of containers and of their hooks. A command that a shell runs is split as the shell would split
    it."""
    found = []
    pods = [*release.pods().values(), release.one("Pod")]
    for container in (each for pod in pods for each in containers(pod).values()):
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        found += [part["command"] for part in (container, hook) if "command" in part]
    return [
        shlex.split(re.sub(r"^exec |^sleep \d+; | \|\| true$", "", command[2]))
        if command[:2] == ["/bin/sh", "-c"]
        else command
        for command in found
    ]


@needs_helm
@every_cluster
@pytest.mark.parametrize("role", list(WorkerRole), ids=lambda role: role.value)
def test_a_pod_has_room_for_one_worker_of_its_role_and_the_head_for_none(
    values: Path, role: WorkerRole
) -> None:
    from cluster.on_ray.placement import bundle_of

    release = render(values)
    bundle = bundle_of(BatonConfig.from_mapping(release.fleet_config()), role)
    (group,) = (each for each in release.ray["workerGroupSpecs"] if each["groupName"] == role.value)
    assert bundle == offered(group["rayStartParams"])
    limits = containers(group["template"])["ray-worker"]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == bundle.get("GPU", 0)
    head = release.ray["headGroupSpec"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"], "resources" in head) == ("0", "0", False)


@needs_helm
def test_ray_start_knows_every_parameter() -> None:
    from ray.scripts.scripts import start

    known = {flag.removeprefix("--") for parameter in start.params for flag in parameter.opts}
    ray = render({"autoscaling": {"workers": {"enabled": True}}}).ray
    params = [
        ray["headGroupSpec"]["rayStartParams"],
        *(group["rayStartParams"] for group in ray["workerGroupSpecs"]),
    ]
    assert {name for each in params for name in each} <= known


@needs_helm
def test_a_gpu_is_one_whatever_nodes_call_it() -> None:
    """KubeRay would look for a name that ends with `gpu`."""
    release = render({"gpu": {"resourceName": "nvidia.com/mig-3g.20gb"}, "decode": {"tensorParallel": 2}})
    gpus = [offered(group["rayStartParams"])["GPU"] for group in release.ray["workerGroupSpecs"]]
    assert gpus == [1, 2]


def offered(params: dict[str, str]) -> dict[str, float]:
    """What `ray start` offers."""
    resources: dict[str, float] = {"CPU": float(params["num-cpus"])} | json.loads(
        params["resources"].strip("'")
    )
    gpus = float(params["num-gpus"])
    return resources | ({"GPU": gpus} if gpus else {})


@needs_helm
def test_nodes_offer_what_those_of_ray_up_offer() -> None:
    types = yaml.safe_load((ROOT / "cluster/ray_up/aws.yaml").read_text())["available_node_types"]
    of_ray_up = {name: set(kind["resources"]) - {"CPU", "GPU"} for name, kind in types.items()}
    groups = render().ray["workerGroupSpecs"]
    of_chart = {
        group["groupName"]: set(json.loads(group["rayStartParams"]["resources"].strip("'")))
        for group in groups
    }
    assert of_chart | {"head": set()} == of_ray_up
    several_hosts = yaml.safe_load((ROOT / "examples" / "several_hosts.yaml").read_text())["cluster"]
    ours = render().fleet_config()["cluster"]
    for key in ("prefill_resources", "decode_resources", "ray_address"):
        assert ours[key] == several_hosts[key]


@needs_helm
def test_ports_lead_where_baton_listens() -> None:
    release = render(
        {"controller": {"port": 7000}, "metrics": {"port": 7001}, "gateway": {"httpService": {"port": 443}}}
    )
    pods, fleet, gateway = release.pods(), release.fleet_config(), release.gateway_config()
    listening: dict[str, Any] = {
        "grpc": gateway["gateway"]["grpc_port"],
        "http": gateway["gateway"]["http_port"],
        "fleet": fleet["cluster"]["fleet_port"],
        "baton-metrics": fleet["network"]["metrics_port"],
    }
    named = {
        port["name"]: port["containerPort"]
        for pod in pods.values()
        for container in containers(pod).values()
        for port in container.get("ports", [])
    }
    assert {name: named[name] for name in listening} == listening
    for service in release.of_kind("Service").values():
        assert all(port["targetPort"] in (*listening, 7000) for port in service["spec"]["ports"])
    assert release.one("Service", "-fleet")["spec"]["ports"][0]["targetPort"] == 7000
    assert release.one("Service", "-http")["spec"]["ports"][0]["port"] == 443
