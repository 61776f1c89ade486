"""The tokens that end an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from engine.eos_tokens import read_eos_token_ids
from tests.factories.models import EOS_TOKEN_ID, make_model_dir


def test_generation_config_names_the_end_tokens_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert read_eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_eos_token_ids(tmp_path) == (5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert read_eos_token_ids(tmp_path) == (2,)
    (tmp_path / "config.json").write_text("{}")
    assert read_eos_token_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["</s>", -1, 2**31, 1.5, True, [2, "x"], {"a": 1}], ids=str)
def test_end_tokens_that_are_no_tokens_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ModelError, match=r"config\.json: eos_token_id must be a token, a list of tokens, or null"
    ):
        read_eos_token_ids(tmp_path)


ADDED = {"added_tokens": [{"id": 6, "content": "<|end|>"}, {"id": 8, "content": "<|im_end|>"}]}


@pytest.mark.parametrize(
    ("tokenizer_config", "tokenizer", "ids"),
    [
        ({"eos_token": "<|im_end|>"}, ADDED, (2, 8)),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, ADDED, (2, 8)),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, None, (2, 9)),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "</s>"}}}, ADDED, (2, 8)),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 2, "content": "</s>"}]}, (2,)),
        ({"eos_token": "<|unknown|>"}, ADDED, (2,)),
        ({"eos_token": "<|im_end|>"}, None, (2,)),
        ({"eos_token": None}, ADDED, (2,)),
        ({"eos_token": 8}, ADDED, (2,)),
        ({}, ADDED, (2,)),
    ],
    ids=str,
)
def test_the_tokenizers_end_token_ends_an_answer_too(
    tmp_path: Path, tokenizer_config: dict[str, Any], tokenizer: dict[str, Any] | None, ids: tuple[int, ...]
) -> None:
    """vLLM does the same. Fine-tuned models often name the end of a turn only there."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_eos_token_ids(tmp_path) == ids


def test_older_folders_name_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(ADDED))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert read_eos_token_ids(tmp_path) == (2, 8)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert read_eos_token_ids(tmp_path) == (2, 6), "tokenizer_config.json has the last word"


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config\.json"):
        read_eos_token_ids(tmp_path)


def test_a_model_whose_configs_name_no_end_ends_with_its_tokenizers(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", eos_token_id=None)
    assert read_eos_token_ids(folder) == (EOS_TOKEN_ID,)
