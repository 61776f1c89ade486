"""Every flag of `baton serve` is a key of the configuration, and says what the key says."""

import argparse

import pytest

from baton.config import BatonConfig
from cli.flags import GATEWAY_FLAGS, SERVE_FLAGS, add_flags, field_of, overrides_from


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, SERVE_FLAGS)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("flag", "place"), SERVE_FLAGS.items())
def test_every_flag_sets_its_key(flag: str, place: tuple[str, str]) -> None:
    section, key = place
    field = field_of(section, key)
    samples = {
        "path": "some/folder",
        "ray_address": "head:6379",
        "host": "0.0.0.0",
        "name": "blue",
        "trace_dir": "some/folder",
        "secret_file": "some/file",
        "api_keys_file": "some/file",
        "gpu_memory_utilization": "0.5",
    }
    choices = [
        c
        for c in ("float32", "dummy", "cuda", "kv_aware", "local", "fp8", "dry_run")
        if c in str(field.annotation)
    ]
    text = samples.get(key) or (choices[0] if choices else "7")
    is_switch = field.annotation in (bool, bool | None)
    overrides = overrides_from(parse(flag) if is_switch else parse(flag, text))
    value = True if is_switch else {"7": 7, "0.5": 0.5}.get(text, text)
    assert overrides == {section: {key: value}}
    if key == "gpu_memory_utilization":
        overrides["engine"]["device"] = "cuda"
    if "expert_parallel" in key:
        overrides["engine"] = {**overrides.get("engine", {}), "tensor_parallel": 2}
    if key == "host":
        overrides["gateway"]["allow_anonymous"] = True
    if place == ("autoscaling", "mode"):
        overrides["autoscaling"]["max_decode"] = 2
    elif section == "autoscaling":
        overrides["autoscaling"]["mode"] = "on"
    section_of_config = getattr(BatonConfig.from_mapping(overrides), section)
    assert getattr(section_of_config, key) == value


def test_a_gateway_has_the_flags_of_its_own_part() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, GATEWAY_FLAGS)
    options = parser.parse_args(["--name", "blue", "--ray-address", "head:6379", "--grpc-port", "1"])
    assert overrides_from(options) == {
        "cluster": {"name": "blue", "ray_address": "head:6379"},
        "gateway": {"grpc_port": 1},
    }
    assert {flag for flag in SERVE_FLAGS if "gateway" in SERVE_FLAGS[flag]} < GATEWAY_FLAGS.keys()
    assert not {"--prefill", "--dtype", "--device", "--num-blocks"} & GATEWAY_FLAGS.keys()


def test_flags_not_given_leave_the_file_alone() -> None:
    assert overrides_from(parse()) == {}
    assert overrides_from(parse("--prefill", "0")) == {"cluster": {"prefill": 0}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--prefill", "two"], "invalid int value: 'two'"),
        (["--no-such-flag"], "unrecognized arguments"),
    ],
)
def test_bad_values_are_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_the_keys_own_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for section, key in SERVE_FLAGS.values():
        assert (
            text.count(f"{section}.{key} (default") + text.count(f"{section}.{key} (unset by default)") == 1
        )
    assert "A Hugging Face folder" in text
    assert "None" not in text  # neither a flag nor the file accepts this word
