"""The templates of `ray up`: what Ray itself says of them, and that they, Baton's configuration and the docs agree."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli

from baton.config import BatonConfig
from cli.main import build_parser

ROOT = Path(__file__).resolve().parents[4]
RAY = ROOT / "cluster/ray_up"
START_NODE = RAY / "start_node.sh"
EXAMPLE = ROOT / "examples/several_hosts.yaml"
TEMPLATES = ("on_premises.yaml", "aws.yaml")


def template(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((RAY / name).read_text())
    return config


def start_node(tmp_path: Path, *arguments: str, at: str | None = "10.0.0.11") -> list[str]:
    """What start_node.sh would have Ray do on the host at that address. CalledProcessError if it refuses."""
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "threads ${OMP_NUM_THREADS:-as there are}"\n')
    ray.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/baton", "OMP_NUM_THREADS": "1"}
    if at is not None:
        environment["SSH_CONNECTION"] = f"10.0.0.10 40000 {at} 22"
    done = subprocess.run(
        [str(START_NODE), *arguments], capture_output=True, text=True, check=True, timeout=20, env=environment
    )
    return done.stdout.splitlines()


def resources_in(arguments: list[str]) -> dict[str, float]:
    (text,) = (value for value in arguments if value.startswith("--resources="))
    resources: dict[str, float] = json.loads(text.removeprefix("--resources="))
    return resources


def node_command(config: dict[str, Any]) -> list[str]:
    """The arguments of start_node.sh in the template of a local provider, as a host's shell would give them."""
    command: str = config["worker_start_ray_commands"][-1]
    return shlex.split(command.replace("$RAY_HEAD_IP", config["provider"]["head_ip"]))[1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ray_accepts_each_template_as_shipped(name: str) -> None:
    validate_config(prepare_config(template(name)))


def test_rays_check_sees_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="worker_start_commands"):
        validate_config(prepare_config({**template("on_premises.yaml"), "worker_start_commands": []}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_work_is_placed_on_a_head(name: str) -> None:
    config = prepare_config(template(name))
    start = config["head_start_ray_commands"][-1].split()
    assert {"ray", "start", "--head", "--num-cpus=0", "--num-gpus=0"} <= set(start)
    # Without it the head starts no other node, and `ray up` says nothing of it.
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start


def test_the_head_of_the_cloud_is_of_a_type_of_its_own() -> None:
    config = template("aws.yaml")
    head = config["available_node_types"][config["head_node_type"]]
    assert head["max_workers"] == 0
    assert head["resources"] == {"CPU": 0}


def test_every_host_of_the_local_provider_finds_its_role(tmp_path: Path) -> None:
    config = template("on_premises.yaml")
    offered = [
        resources_in(start_node(tmp_path, *node_command(config), at=host))
        for host in config["provider"]["worker_ips"]
    ]
    assert offered == [{"prefill": 1}, {"prefill": 1}, {"decode": 1}, {"decode": 1}]


def test_a_host_may_have_both_roles_and_room_for_several_workers(tmp_path: Path) -> None:
    arguments = start_node(tmp_path, "10.0.0.10:6379", "10.0.0.12=decode", "10.0.0.11=prefill:3,decode")
    assert resources_in(arguments) == {"prefill": 3, "decode": 1}
    assert {"--labels=role=prefill-decode", "--address=10.0.0.10:6379", "--node-ip-address=10.0.0.11"} <= set(
        arguments
    )


def test_workers_do_not_inherit_the_one_thread_of_ray_up(tmp_path: Path) -> None:
    assert start_node(tmp_path, "10.0.0.10:6379", "10.0.0.11=decode")[-1] == "threads as there are"
    assert "env -u OMP_NUM_THREADS" in template("aws.yaml")["worker_start_ray_commands"][-1]


@pytest.mark.parametrize(
    ("arguments", "at", "complaint"),
    [
        (("10.0.0.10:6379",), "10.0.0.11", "expected the head's address and the roles"),
        (("10.0.0.10:6379", "10.0.0.12=decode"), "10.0.0.11", "no role is given for this host, 10.0.0.11"),
        (("10.0.0.10:6379", "10.0.0.11=gateway"), "10.0.0.11", "got role 'gateway'"),
        (("10.0.0.10:6379", "10.0.0.11=decode:0"), "10.0.0.11", "got 'decode:0'"),
        (("10.0.0.10:6379", "10.0.0.11"), "10.0.0.11", "got '10.0.0.11'; expected HOST=ROLE"),
        (("10.0.0.10:6379", "10.0.0.11=decode"), None, "SSH_CONNECTION is not set"),
    ],
)
def test_a_wrong_command_starts_nothing(
    tmp_path: Path, arguments: tuple[str, ...], at: str | None, complaint: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        start_node(tmp_path, *arguments, at=at)
    assert complaint in refused.value.stderr
    assert refused.value.stdout == ""


def test_the_example_is_for_several_hosts() -> None:
    config = BatonConfig.from_yaml(EXAMPLE)
    assert config.cluster.ray_address == "auto"
    assert config.network.bind_host == "0.0.0.0"
    assert config.network.security == "curve"


def test_every_worker_of_the_example_finds_room(tmp_path: Path) -> None:
    """The hosts of the templates offer what the example asks of Ray, with the same names and labels."""
    cluster = BatonConfig.from_yaml(EXAMPLE).cluster
    local = template("on_premises.yaml")
    hosts = [
        resources_in(start_node(tmp_path, *node_command(local), at=host))
        for host in local["provider"]["worker_ips"]
    ]
    cloud = template("aws.yaml")["available_node_types"]
    for role, count, asked in (
        ("prefill", cluster.prefill, cluster.prefill_resources),
        ("decode", cluster.decode, cluster.decode_resources),
    ):
        ((name, amount),) = asked.items()
        assert sum(host.get(name, 0.0) for host in hosts) >= count * amount
        assert cloud[role]["min_workers"] * cloud[role]["resources"][name] >= count * amount
        assert [kind for kind, node in cloud.items() if name in node["resources"]] == [role]
        assert cloud[role]["labels"] == {"role": role}


def test_the_cloud_image_has_the_ray_of_the_lock() -> None:
    (version,) = re.findall(r"^ray==(.+)$", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE)
    assert template("aws.yaml")["docker"]["image"].startswith(f"rayproject/ray:{version}-")


@pytest.mark.parametrize("name", TEMPLATES)
def test_token_secret_and_code_get_to_every_node(name: str) -> None:
    config = template(name)
    files = ("~/.ray/auth_token", "~/.config/baton/cluster.secret")
    assert config["file_mounts"] == {"~/baton": ".", **{file: file for file in files}}
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    commands = [
        *config["setup_commands"],
        *config["head_start_ray_commands"],
        *config["worker_start_ray_commands"],
    ]
    for path in re.findall(r"~/baton/([\w./]+)", " ".join(commands)):
        assert (ROOT / path).is_file()


DOCS = (ROOT / "docs/ray.md", *(RAY / name for name in TEMPLATES), EXAMPLE)


def commands_in(text: str, program: str) -> list[list[str]]:
    """The arguments of every call of the program: at a line's begin, in quotes, or behind `&&`, `--` or a variable."""
    calls = re.findall(rf"""(?m)(?:^(?:#  )?|[`']|&& |-- |=0) *{program} ([a-z][^`'\n|─]*)""", text)
    return [shlex.split(re.split(r" {3,}| \\\\$", call)[0].strip("\\")) for call in calls]


def test_documented_commands_are_found() -> None:
    text = DOCS[0].read_text()
    assert {call[0] for call in commands_in(text, "baton")} >= {"serve", "generate", "status"}
    assert {call[0] for call in commands_in(text, "ray")} >= {
        "up",
        "down",
        "exec",
        "job",
        "status",
        "get-auth-token",
    }
    assert commands_in(DOCS[2].read_text(), "baton") == [
        ["serve", "examples/several_hosts.yaml", "--device", "cuda"]
    ]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_documented_commands_and_files_exist(doc: Path) -> None:
    text = doc.read_text()
    for arguments in commands_in(text, "baton"):
        build_parser().parse_args(arguments)
    for arguments in commands_in(text, "ray"):
        assert arguments[0] in ray_cli.commands
    for path in re.findall(r"\b((?:cluster/ray_up|examples|tests|docs)/[\w./]+\w)", text):
        assert (ROOT / path).exists(), f"{doc.name} names {path}"
