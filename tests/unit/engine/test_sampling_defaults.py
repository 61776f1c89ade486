"""The sampling settings that a model names for requests without their own."""

import json
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.sampling import SamplingParams
from engine.sampling_defaults import read_sampling_defaults

QWEN3 = {"do_sample": True, "eos_token_id": [2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_the_file_names_the_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingParams(), "no file"
    write(tmp_path, QWEN3)
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    write(tmp_path, {"min_p": 0, "repetition_penalty": 1.05, "do_sample": False, "top_k": 0, "max_tokens": 3})
    assert read_sampling_defaults(tmp_path) == SamplingParams(repetition_penalty=1.05)


def test_all_tokens_may_be_written_in_two_ways_and_the_log_tells_the_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write(tmp_path, {"top_k": -1, "temperature": 0.6})
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=0.6)
    assert caplog.messages == ["sampling defaults of generation_config.json: temperature 0.6, top_k 0"]


def test_null_is_no_default_and_0_is_one(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": 0, "top_p": None, "top_k": None})
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == SamplingParams(temperature=0.0)
    assert type(defaults.temperature) is float, "workers get the declared type"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -1, "must be from 0 to 100, got -1"),
        ("temperature", "0.6", "must be a number, got '0.6'"),
        ("temperature", True, "must be a number, got True"),
        ("temperature", float("nan"), "must be a finite number, got nan"),
        ("temperature", 10**400, "must be from 0 to 100, got 1000"),
        ("top_p", 0.0, "must be above 0 and up to 1, got 0.0"),
        ("top_k", -2, "must be 0 (every token) or more, got -2"),
        ("top_k", 20.0, "must be an integer, got 20.0"),
        ("min_p", [0.1], "must be a number, got [0.1]"),
        ("repetition_penalty", 0, "must be from 0.01 to 100, got 0"),
    ],
    ids=str,
)
def test_a_value_that_no_request_may_have_is_refused(
    tmp_path: Path, name: str, value: object, problem: str
) -> None:
    write(tmp_path, {name: value})
    with pytest.raises(ModelError) as refusal:
        read_sampling_defaults(tmp_path)
    text = str(refusal.value)
    assert f"generation_config.json: {name} {problem}" in text
    assert "gateway.sampling_defaults: openai" in text


def write(folder: Path, config: dict[str, object]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))
