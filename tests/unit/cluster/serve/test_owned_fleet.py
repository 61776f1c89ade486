"""What a deployment asks of a private Ray, and what it takes from the fleet that it adopts."""

import io
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from baton.config import BatonConfig, GatewayConfig
from baton.errors import BatonError, ConfigError, ModelError
from cluster.serve import owned_fleet
from cluster.serve.gateway import _served_model, check_ports
from cluster.serve.owned_fleet import fleets_folder, most_ranks, resolve_model, with_choices_of
from cluster.serve.screen import Screen
from engine.loading import dtype
from tests.factories.control_api import MODEL_PATH, StandingFleet, packed
from tests.factories.models import make_model_dir


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({"cluster": {"prefill": 1, "decode": 2}}, 3),
        ({"cluster": {"prefill": 1, "decode": 2, "decode_tensor_parallel": 4}}, 9),
        ({"autoscaling": {"mode": "dry_run", "max_decode": 5}}, 2),
        ({"autoscaling": {"mode": "on", "max_decode": 5}}, 6),  # else none that is added would ever find room
        ({"engine": {"tensor_parallel": 2}, "autoscaling": {"mode": "on", "max_decode": 5}}, 12),
    ],
)
def test_a_private_ray_has_room_for_the_most_workers(sections: dict[str, Any], count: int) -> None:
    assert most_ranks(BatonConfig.from_mapping(sections)) == count


@pytest.mark.parametrize("asked", ["auto", "bfloat16"])
@pytest.mark.parametrize("there", ["bfloat16", "float32"])
async def test_the_data_type_is_that_of_the_fleet_and_said_if_it_is_not_the_one_chosen_here(
    asked: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    fleet = StandingFleet(packed(BatonConfig.from_mapping({"model": {"dtype": there}})))
    ours = BatonConfig.from_mapping({"model": {"dtype": asked}, "gateway": {"max_in_flight": 7}})
    said = io.StringIO()
    agreed = await with_choices_of(fleet, ours, MODEL_PATH, Screen(Console(file=said, width=200)))
    assert agreed.model.dtype == there
    assert agreed.gateway == ours.gateway
    assert said.getvalue().split() == (
        [] if there == "bfloat16" else ["model", "in", "float32,", "as", "the", "fleet", "was", "started"]
    )


async def test_the_type_of_kv_is_that_of_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset[str]())
    monkeypatch.setattr(dtype, "may_have_kernels", lambda _: True)
    kept_whole = BatonConfig.from_mapping({"model": {"dtype": "float32"}})
    said = io.StringIO()
    screen = Screen(Console(file=said, width=200))
    agreed = await with_choices_of(StandingFleet(packed(kept_whole)), BatonConfig(), MODEL_PATH, screen)
    assert agreed.engine.kv_cache_dtype == "auto"
    assert said.getvalue().split() == ["model", "in", "float32,", "as", "the", "fleet", "was", "started"]


COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("asked", "there", "agreed"),
    [
        ("acme/tiny", f"acme/tiny@{COMMIT}", f"acme/tiny@{COMMIT}"),
        ("acme/tiny@main", f"acme/tiny@{COMMIT}", "acme/tiny@main"),
        ("/models/tiny", "/models/tiny", "/models/tiny"),
    ],
)
async def test_the_commit_is_the_fleets_if_the_name_leaves_it_open(
    asked: str, there: str, agreed: str
) -> None:
    fleet = StandingFleet(packed(BatonConfig.from_mapping({"model": {"path": there, "dtype": "float32"}})))
    ours = BatonConfig.from_mapping({"model": {"path": asked, "dtype": "float32"}})
    screen = Screen(Console(file=io.StringIO()))
    assert (await with_choices_of(fleet, ours, MODEL_PATH, screen)).model.path == agreed


def test_the_gateway_of_an_adopted_fleet_takes_the_fleets_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (Path("/cache/snapshots") / commit for commit in (COMMIT, OTHER))
    resolved: list[tuple[str, bool]] = []

    def resolve(name: str, _cache: Path, *, weights: bool) -> Path:
        resolved.append((name, weights))
        return theirs

    monkeypatch.setattr(owned_fleet, "resolve", resolve)
    out = io.StringIO()
    screen = Screen(Console(file=out, width=200))

    def folder_of(path: str) -> Path:
        return fleets_folder(BatonConfig.from_mapping({"model": {"path": path}}), ours, screen)

    assert [folder_of(path) for path in ("smollm2", "acme/tiny@main", f"acme/tiny@{COMMIT}")] == [ours] * 3
    assert (resolved, out.getvalue()) == ([], "")
    assert folder_of(f"acme/tiny@{OTHER}") == theirs
    assert resolved == [(f"acme/tiny@{OTHER}", False)]
    assert f"acme/tiny@{OTHER}, as the fleet was started" in out.getvalue()


@pytest.mark.parametrize(
    ("sections", "with_weights"),
    [
        ({"cluster": {"ray_address": "none"}}, [False, True]),
        ({}, [False, True]),
        ({"model": {"load_format": "dummy"}}, [False]),
        ({"cluster": {"ray_address": "head:6379"}}, [False]),
    ],
)
def test_weights_come_where_the_workers_are(
    sections: dict[str, Any], with_weights: list[bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def resolve(_name: str, _cache: Path, _progress: object, *, weights: bool = True) -> Path:
        asked.append(weights)
        return folder

    monkeypatch.setattr(owned_fleet, "resolve", resolve)
    out = io.StringIO()
    config = BatonConfig.from_mapping({"engine": {"kv_cache_memory_mib": 8}, **sections})
    assert resolve_model(config, Screen(Console(file=out, width=200))) == (config, folder)
    assert asked == with_weights
    said = out.getvalue()
    assert "KiB of KV per token; 8 MiB of KV hold" in said
    assert "M parameters" in said


def test_no_weights_come_of_a_model_that_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    asked: list[bool] = []

    def resolve(_name: str, _cache: Path, _progress: object, *, weights: bool = True) -> Path:
        asked.append(weights)
        return tmp_path

    monkeypatch.setattr(owned_fleet, "resolve", resolve)
    with pytest.raises(ModelError, match="has no tokenizer"):
        resolve_model(BatonConfig(), Screen(Console(file=io.StringIO())))
    assert asked == [False]


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_folder_without_weights_is_refused_before_any_worker_starts(
    is_draft: bool, tmp_path: Path, folder: Path
) -> None:
    """Only workers on this machine need the weights here."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    speculation = {"method": "draft_model", "draft_model": str(tmp_path)}
    sections = {
        "engine": {"kv_cache_memory_mib": 8},
        "model": {"path": str(folder if is_draft else tmp_path)},
        **({"speculation": speculation} if is_draft else {}),
    }
    screen = Screen(Console(file=io.StringIO()))
    with pytest.raises(ModelError, match=r"model\.safetensors does not exist"):
        resolve_model(BatonConfig.from_mapping(sections), screen)
    resolve_model(BatonConfig.from_mapping({**sections, "cluster": {"ray_address": "head:6379"}}), screen)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"draft_layers": 99}, "draft_layers: got 99, but the served model has"),
        (
            {"draft_model": "small"},
            "speculation.draft_model: .* has 320 tokens in its vocabulary, but the served",
        ),
    ],
    ids=str,
)
def test_drafts_that_a_worker_would_refuse_are_refused_before_the_weights_are_downloaded(
    speculation: dict[str, Any], message: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"smollm2": folder, "small": make_model_dir(tmp_path, num_hidden_layers=1, vocab_size=320)}

    def resolve(name: str, *_: object, weights: bool = True) -> Path:
        assert not weights, "not yet"
        return folders[name]

    monkeypatch.setattr(owned_fleet, "resolve", resolve)
    config = BatonConfig.from_mapping({"speculation": {"method": "draft_model", **speculation}})
    with pytest.raises(BatonError, match=message):
        resolve_model(config, Screen(Console(file=io.StringIO())))


def test_an_adapter_that_is_not_applied_is_named(tmp_path: Path, folder: Path) -> None:
    said: list[str] = []
    config = BatonConfig.from_mapping(
        {"model": {"path": str(tmp_path)}, "engine": {"kv_cache_memory_mib": 8}}
    )
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for _ in range(2):
        out = io.StringIO()
        resolve_model(config, Screen(Console(file=out, width=200)))
        said.append(out.getvalue())
        (tmp_path / "adapter_config.json").write_text("{}")
    assert ["without the adapter of adapter_config.json" in each for each in said] == [False, True]


def test_all_workers_get_the_draft_model_of_one_commit_and_room_for_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.parent.mkdir()
    snapshot.symlink_to(folder)
    folders = {"smollm2": folder, "acme/draft": snapshot}
    monkeypatch.setattr(owned_fleet, "resolve", lambda name, *_, **__: folders[name.partition("@")[0]])
    out = io.StringIO()
    config = BatonConfig.from_mapping(
        {
            "engine": {"kv_cache_memory_mib": 8},
            "speculation": {"method": "draft_model", "draft_model": "acme/draft"},
        }
    )
    chosen, path = resolve_model(config, Screen(Console(file=out, width=200)))
    assert (chosen.speculation.draft_model, path) == (f"acme/draft@{COMMIT}", folder)
    assert chosen.model == config.model
    assert "of a draft model's weights" in out.getvalue()


@pytest.mark.parametrize(
    ("path", "is_of_the_hub", "name"),
    [
        (f"acme/tiny@{COMMIT}", True, "acme/tiny"),
        (f"acme/tiny@{COMMIT}:Q8_0", True, "acme/tiny:Q8_0"),
        ("models/tiny", False, "local"),
        ("smollm2", False, "smollm2"),
    ],
)
def test_clients_ask_for_a_model_by_its_name(
    path: str, is_of_the_hub: bool, name: str, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "snapshots" / COMMIT if is_of_the_hub else tmp_path / "local"
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(folder)
    config = BatonConfig.from_mapping({"model": {"path": path}})
    assert _served_model(config, place).name == name


@pytest.mark.parametrize(("source", "temperature"), [("model", 0.6), ("openai", 1.0)])
def test_sampling_defaults_are_the_models_or_openais(
    source: str, temperature: float, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    config = BatonConfig.from_mapping({"gateway": {"sampling_defaults": source}})
    assert _served_model(config, tmp_path).sampling_defaults.temperature == temperature


FORBIDDEN = (
    "use an address of this machine as gateway.host, and a port that is free and that this user may use"
)


@pytest.mark.parametrize(
    ("host", "error", "complaint"),
    [
        (
            "127.0.0.1",
            None,
            r"gateway\.grpc_port: 127\.0\.0\.1:\d+ is in use, perhaps by another `baton serve`",
        ),
        ("203.0.113.77", None, rf"gateway\.grpc_port: cannot listen on 203\.0\.113\.77:\d+: .*; {FORBIDDEN}"),
        (
            "gone",
            socket.gaierror(-2, "Name unknown"),
            rf"cannot listen on gone:\d+: Name unknown; {FORBIDDEN}",
        ),
    ],
)
def test_a_place_where_the_gateway_cannot_listen_is_named_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, host: str, error: OSError | None, complaint: str
) -> None:
    if error is not None:
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = GatewayConfig.model_construct(host=host, grpc_port=port)
        with pytest.raises(ConfigError, match=complaint):
            check_ports(config)


def test_the_http_port_is_checked_where_the_server_listens() -> None:
    """gRPC would listen on ::1, too."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        check_ports(GatewayConfig(host="localhost", grpc_port=0, http_port=other.getsockname()[1]))


def test_one_address_of_a_host_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, `localhost` may also mean ::1, although IPv6 is off."""
    found = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("203.0.113.77", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    check_ports(GatewayConfig(host="localhost", grpc_port=0))
