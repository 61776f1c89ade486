"""What a gateway that joins a fleet takes from it, and what from its own configuration; and whom it does not join."""

import asyncio
import io
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.config import BatonConfig, merge
from baton.errors import ClusterError, FleetEnded
from baton.system.curve import ClusterKeys, derive_keys
from baton.system.signals import StopSignals
from cli.flags import for_one_fleet
from cli.main import USAGE, main
from cluster.control_api.configuration import keys_digest
from cluster.serve import joining
from cluster.serve.following_gateway import Service
from cluster.serve.joining import AnotherFleet, FleetSource, FoundFleet, _find, _load, _run, _with_gateway_of
from cluster.serve.screen import Screen
from tests.factories.models import make_model_dir
from tests.factories.stub_hub import stub_hub, use_in_this_process

THEIRS = BatonConfig.from_mapping(
    {
        "model": {"path": "/models/tiny", "dtype": "float32"},
        "scheduler": {"max_model_len": 77},
        "network": {"security": "none", "peer_timeout_s": 2.0},
        "cluster": {"name": "blue", "drain_timeout_s": 3.0},
        "gateway": {"max_in_flight": 1, "max_queued": 1},
    }
)


class Controller:
    """A fleet with these keys; tests only request its configuration."""

    def __init__(self, keys: ClusterKeys | None = None) -> None:
        self.keys = keys or derive_keys(None)


def source_of(*looks: Controller | ClusterError) -> FleetSource:
    """A place that shows one of `looks` at each look, in order, and then the last one again and again."""
    left = list(looks)

    async def find_fleet() -> FoundFleet:
        look = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(look, ClusterError):
            raise look
        return FoundFleet(look, THEIRS, Path("/models/tiny"), keys_digest(look.keys))  # type: ignore[arg-type]

    return FleetSource("there is no fleet named 'blue'", find_fleet)


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FoundFleet, str]]:
    """Looks for a fleet in such a place. Returns the fleet, and the output."""

    def find(*looks: Controller | ClusterError, **sections: Any) -> tuple[FoundFleet, str]:
        monkeypatch.setattr(joining, "_TRY_AGAIN_S", 0.0)
        cluster = {"name": "blue", "ray_address": "head:6379", "start_timeout_s": 0.2}
        config = BatonConfig.from_mapping({"cluster": cluster, **sections})
        said = io.StringIO()
        found, _ = asyncio.run(_find(config, source_of(*looks), Screen(Console(file=said, width=200))))
        return found, said.getvalue()

    return find


def test_a_fleet_is_waited_for_until_it_is_there_and_answers(
    find: Callable[..., tuple[FoundFleet, str]],
) -> None:
    control = Controller()
    starting = ClusterError("it is not quite there yet")
    found, said = find(ClusterError("nobody"), starting, starting, control)
    assert id(found.control) == id(control)
    assert said.count("there is no fleet named 'blue' yet; waiting 0.2 s at most: nobody") == 1
    assert said.count("still waiting: it is not quite there yet") == 1, "each reason once"


def test_the_wait_for_a_fleet_is_bounded(find: Callable[..., tuple[FoundFleet, str]]) -> None:
    with pytest.raises(ClusterError, match=r"no fleet named 'blue'; waited 0.2 s .* start one: nobody"):
        find(ClusterError("nobody"))


def test_a_fleet_that_refuses_us_is_not_waited_for(find: Callable[..., tuple[FoundFleet, str]]) -> None:
    with pytest.raises(AnotherFleet, match="not ours"):
        find(ClusterError("nobody"), AnotherFleet("not ours"), Controller())


@pytest.mark.parametrize(
    ("end", "says_so"), [(FleetEnded("its owner ended it"), False), (ClusterError("too late"), True)]
)
async def test_a_gateway_says_that_the_fleet_continues_only_if_it_does(
    end: ClusterError, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Following:
        def __init__(self, *_: Any) -> None: ...

        async def start(self) -> Service:
            return Service("here:1", None, (), "tiny")

        async def use(self, work: Coroutine[Any, Any, None]) -> None:
            work.close()
            raise end

        async def stop(self, hurry: asyncio.Event) -> None: ...

    async def found(*_: Any) -> tuple[FoundFleet, None]:
        return FoundFleet(Controller(), THEIRS, Path(), ""), None  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "_find", found)
    monkeypatch.setattr(joining, "_load", lambda *_: (Path(), None))
    monkeypatch.setattr(joining, "make_gateway", lambda *_: None)
    monkeypatch.setattr(joining, "FollowingGateway", Following)
    said, config = io.StringIO(), BatonConfig.from_mapping({"cluster": {"ray_address": "head:6379"}})
    screen = Screen(Console(file=said, width=200))
    with StopSignals() as signals, pytest.raises(type(end)):
        await _run(config, screen, lambda _: asyncio.sleep(0), signals)
    assert "stopping  running requests have" in said.getvalue()
    assert ("the fleet continues" in said.getvalue()) is says_so


def test_a_fleet_of_another_configuration_is_not_joined(find: Callable[..., tuple[FoundFleet, str]]) -> None:
    with pytest.raises(
        ClusterError,
        match=r"'blue' differs from this configuration: model.dtype is 'float32' in the running fleet, 'bfloat16'",
    ):
        find(Controller(), model={"dtype": "bfloat16"})
    found, _ = find(Controller(), model={"dtype": "float32"})
    assert found.config.model.dtype == "float32"


def test_a_fleet_of_another_secret_is_not_joined(find: Callable[..., tuple[FoundFleet, str]]) -> None:
    with pytest.raises(ClusterError, match="its cluster secret differs"):
        find(Controller(keys=ClusterKeys(None, None, b"other" * 8)))


def test_the_fleet_decides_but_for_the_gateways_own_part_and_this_machines() -> None:
    ours = BatonConfig.from_mapping(
        {
            "cluster": {
                "name": "blue",
                "ray_address": "head:6379",
                "ray_timeout_s": 7.0,
                "start_timeout_s": 9.0,
            },
            "gateway": {"max_in_flight": 2},
        }
    )
    merged = _with_gateway_of(ours, THEIRS)
    assert merged.gateway == ours.gateway
    assert merged.scheduler == THEIRS.scheduler
    assert (merged.network.secret_file, merged.network.peer_timeout_s) == (None, 2.0)
    cluster = merged.cluster
    assert (cluster.ray_address, cluster.ray_timeout_s) == ("head:6379", 7.0)
    assert (cluster.start_timeout_s, cluster.drain_timeout_s) == (9.0, 3.0)


@pytest.mark.slow
def test_the_model_is_the_fleets_wherever_it_is_on_this_machine(tmp_path: Path) -> None:
    model, other = make_model_dir(tmp_path / "tiny"), make_model_dir(tmp_path / "other")

    def load(ours: dict[str, Any], theirs: str, their_path: Path) -> Path:
        config = BatonConfig.from_mapping({"model": ours})
        fleet = BatonConfig.from_mapping({"model": {"path": theirs}})
        return _load(config, FoundFleet(Controller(), fleet, their_path, ""))[0]  # type: ignore[arg-type]

    assert load({}, str(model), model) == model
    assert load({"path": str(model)}, "somewhere", model) == model
    assert load({"path": str(model)}, str(model), Path("/elsewhere")) == model
    with pytest.raises(ClusterError, match=r"model\.path is"):
        load({"path": str(other)}, str(model), model)


@pytest.mark.slow
def test_a_name_of_the_hub_is_the_fleets_commit_without_its_weights(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub() as hub:
        use_in_this_process(hub, tmp_path, monkeypatch)
        old = hub.add_folder("acme/tiny", folder)
        hub.repositories["acme/tiny"].refs["v1"] = old
        hub.add_folder("acme/tiny", folder, extra__json=b"{}")
        fleet = BatonConfig.from_mapping({"model": {"path": f"acme/tiny@{old}"}})

        def load(**ours: str) -> Path:
            config = BatonConfig.from_mapping({"model": ours})
            theirs = Path("/elsewhere/snapshots") / old
            return _load(config, FoundFleet(Controller(), fleet, theirs, ""))[0]  # type: ignore[arg-type]

        names: tuple[dict[str, str], ...] = (
            {},
            {"path": "acme/tiny"},
            {"path": "acme/tiny@v1"},
            {"path": f"acme/tiny@{old}"},
        )
        paths = {load(**ours) for ours in names}
        assert {path.name for path in paths} == {old}
        assert hub.content_bytes == 0
        with pytest.raises(
            ClusterError,
            match=r"model\.path is '/elsewhere/.*' in the running fleet, '.*' in this configuration",
        ):
            load(path="acme/tiny@main")


@pytest.mark.parametrize("address", ["local", "none"])
def test_a_private_fleet_cannot_be_joined(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--ray-address", address]) == USAGE
    assert f"cluster.ray_address: got '{address}'" in capsys.readouterr().err


def test_one_file_serves_fleet_and_gateway_since_the_flag_wins_over_it() -> None:
    values = {"cluster": {"ray_address": "auto", "prefill_labels": {"role": "prefill"}}}
    overrides = for_one_fleet({"cluster": {"fleet_address": "fleet:50050"}})
    config = BatonConfig.from_mapping(merge(values, overrides))
    assert (config.cluster.fleet_address, "ray_address" in config.cluster.model_fields_set) == (
        "fleet:50050",
        False,
    )
    back = for_one_fleet({"cluster": {"ray_address": "auto"}})
    assert (
        BatonConfig.from_mapping(merge({"cluster": {"fleet_address": "a:1"}}, back)).cluster.fleet_address
        is None
    )


def test_two_ways_to_one_fleet_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--ray-address", "auto", "--fleet-address", "fleet:50050"]) == USAGE
    assert "both say where the fleet is; set only one of the two keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["fleet", "fleet:", ":1", "fleet:0", "fleet:65536", "::1:5", "[fleet]:5", "a b:5", "tcp://a:5"]
)
def test_a_fleet_has_an_address_with_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--fleet-address", address]) == USAGE
    assert f"cluster.fleet_address: got '{address}'; use HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["fleet:50050", "10.1.2.3:1", "[::1]:65535", "fleet.ns.svc:5"])
def test_addresses_of_either_family_and_names_will_do(address: str) -> None:
    assert BatonConfig.from_mapping({"cluster": {"fleet_address": address}}).cluster.fleet_address == address


def test_a_command_that_starts_a_fleet_refuses_the_address_of_one_and_a_port_that_it_does_not_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("cluster: {fleet_address: 'fleet:50050'}")
    for command in ("serve", "fleet"):
        assert main([command, str(file)]) == USAGE
        assert f"`baton {command}` starts its own fleet, so remove the key" in capsys.readouterr().err

    file.write_text("cluster: {fleet_port: 6390}")
    assert main(["serve", str(file)]) == USAGE
    assert "cluster.fleet_port: got 6390, which is only for `baton fleet`" in capsys.readouterr().err
