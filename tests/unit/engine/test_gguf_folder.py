"""A GGUF file's metadata as a Hugging Face folder: architecture, tokens and template, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from baton.errors import ModelError
from engine.eos_tokens import read_eos_token_ids
from engine.loading.gguf import read_gguf
from engine.loading.gguf_folder import describe, gguf_of, hugging_face_config
from engine.loading.gguf_tokenizer import special_token_ids, special_tokens
from engine.loading.pretrained import resolve
from engine.model_config import read_architecture
from engine.rope_config import RopeType
from gateway.conversation import ChatMessage, Conversation, Tool
from gateway.text.tokenizer import Tokenizer
from tests.factories.families import QWEN3_MOE
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir

GEMMA3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40, "num_hidden_layers": 7}
"""With a layer that has no window."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("source"), num_hidden_layers=1, rms_norm_eps=2**-17)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
        ("gemma3_text", GEMMA3),
        ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_the_architecture_is_that_of_the_original_folder(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    original = make_model_dir(tmp_path / "source", architecture, rms_norm_eps=2**-17, **overrides)
    describe(make_gguf(tmp_path / "m.gguf", original), tmp_path / "folder")
    assert read_architecture(tmp_path / "folder") == read_architecture(original)
    assert read_eos_token_ids(tmp_path / "folder") == (2, 0), "and the end of a text, by its name"


def test_tokens_and_chat_are_those_of_the_original_folder(tmp_path: Path, source: Path) -> None:
    describe(make_gguf(tmp_path / "m.gguf", source), tmp_path / "folder")
    theirs, ours = Tokenizer(source), Tokenizer(tmp_path / "folder")
    messages = Conversation((ChatMessage("user", "What is the capital?"),))
    chat = ours.render_chat(messages)
    assert chat == theirs.render_chat(messages)
    assert ours.encode(chat) == theirs.encode(chat)
    assert (
        ours.decode(ours.encode(chat), skip_special_tokens=True) == "user\nWhat is the capital?\nassistant\n"
    )
    assert ours.vocab_size == theirs.vocab_size == 300


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_tokens_follow_the_files_own_rule_whatever_the_architecture(
    tmp_path: Path, architecture: str, pre: str
) -> None:
    """transformers has a class of its own for Qwen2, which knows only the rule `qwen2`."""
    model = make_model_dir(tmp_path / "model", architecture, num_hidden_layers=1)
    file = make_gguf(
        tmp_path / "m.gguf", model, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=True
    )
    folder = resolve(str(file), tmp_path / "cache")
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Tokenizer(folder)
    for text in ("", "DON'T  the\n\n Cache//\n12345", "e\u0301 \u00e9 \u65e5\u672c", " \r\n \t<|im_end|> x"):
        ids = list(ours.encode(text))
        assert ids == expected.encode(text).ids
        assert ours.decode(ids, True) == expected.decode(ids)


def test_safetensors_come_before_a_gguf_file_beside_them(tmp_path: Path, source: Path) -> None:
    gguf_file = make_gguf(tmp_path / "model.gguf", source)
    assert gguf_of(tmp_path) == gguf_file
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    assert gguf_of(tmp_path) is None


def test_without_a_template_there_is_no_chat(tmp_path: Path, source: Path) -> None:
    describe(make_gguf(tmp_path / "m.gguf", source, tokenizer__chat_template=None), tmp_path / "folder")
    assert not Tokenizer(tmp_path / "folder").has_chat_template


def test_a_template_for_tools_is_used_for_them(tmp_path: Path, source: Path) -> None:
    keys: dict[str, Any] = {
        "tokenizer__chat_template": "{{ messages[0].content }}",
        "tokenizer__chat_template__tool_use": "<tool_call> for {{ tools[0].function.name }}",
    }
    tokenizer = Tokenizer(resolve(str(make_gguf(tmp_path / "m.gguf", source, **keys)), tmp_path / "cache"))
    asked = Conversation((ChatMessage("user", "What is the capital?"),))
    assert tokenizer.render_chat(asked) == "What is the capital?"
    with_tools = replace(asked, tools=(Tool("search"),))
    assert tokenizer.render_chat(with_tools) == "<tool_call> for search"


@pytest.mark.parametrize("key", ["bos", "unknown", "padding"])
def test_a_token_of_ordinary_text_stays_in_answers_though_a_key_names_it(
    tmp_path: Path, source: Path, key: str
) -> None:
    """Token 3 is an exclamation mark."""
    keys: dict[str, Any] = {f"tokenizer__ggml__{key}_token_id": 3, "tokenizer__ggml__add_bos_token": False}
    tokenizer = Tokenizer(resolve(str(make_gguf(tmp_path / "m.gguf", source, **keys)), tmp_path / "cache"))
    ids = tokenizer.encode("Yes!!")
    assert 3 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Yes!!"
    assert f"{key[:3]}_token" not in special_tokens(read_gguf(tmp_path / "m.gguf"))


def test_every_kind_of_end_ends_an_answer(tmp_path: Path, source: Path) -> None:
    ids: dict[str, Any] = {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 2}
    describe(make_gguf(tmp_path / "m.gguf", source, **ids), tmp_path / "folder")
    assert read_eos_token_ids(tmp_path / "folder") == (2, 7, 0)


def test_ends_that_chat_templates_write_end_an_answer_though_no_key_names_them(
    tmp_path: Path, source: Path
) -> None:
    """llama.cpp does the same: many files name only the end of a text, and their templates end each turn with
    another token."""
    tokens = [f"token {token_id}" for token_id in range(300)]
    tokens[9], tokens[11], tokens[5], tokens[6] = "<|im_end|>", "<|eom_id|>", "<|endoftext|>", "<|im_end|> "
    keys: dict[str, Any] = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__merges": [""]}
    file = read_gguf(make_gguf(tmp_path / "m.gguf", source, **keys))
    assert special_token_ids(file) == {"bos_token_id": 1, "eos_token_id": [2, 5, 9, 11]}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": RopeType.DEFAULT, "factor": 1.0}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": RopeType.LINEAR, "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": RopeType.LINEAR, "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": RopeType.DEFAULT}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 256},
            {"rope_type": RopeType.YARN, "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"rope_type": RopeType.YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
    ids=str,
)
def test_rope(tmp_path: Path, source: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    keys = {f"llama__rope__scaling__{key}": value for key, value in metadata.items()}
    describe(make_gguf(tmp_path / "m.gguf", source, llama__rope__freq_base=5e5, **keys), tmp_path / "folder")
    rope = read_architecture(tmp_path / "folder").ropes[0]
    assert rope is not None
    assert rope.theta == 5e5
    assert {key: getattr(rope, key) for key in expected} == expected


def test_the_older_name_of_a_linear_factor(tmp_path: Path, source: Path) -> None:
    describe(make_gguf(tmp_path / "m.gguf", source, llama__rope__scale_linear=8.0), tmp_path / "folder")
    rope = read_architecture(tmp_path / "folder").ropes[0]
    assert rope is not None
    assert (rope.rope_type, rope.factor) == (RopeType.LINEAR, 8.0)


def llama3_divisors(factor: float, head_dim: int, theta: float) -> list[float]:
    """As llama.cpp's converter computes them."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        inside = 1.0 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4.0 else factor if wavelength > 8192 / 1.0 else inside)
    return divisors


def llama3_file(path: Path, divisors: list[float], **scaling: float) -> Path:
    """A file without layers."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in SIZES.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 5e5)
    for key, factor in scaling.items():
        writer.add_float32(f"llama.rope.scaling.{key}", factor)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((300, 256), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_llama_3_rope_is_found_by_its_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors(32.0, 64, 5e5)
    assert len(set(divisors)) == 5, "some between the ends"
    path = llama3_file(tmp_path / "m.gguf", divisors)
    config = hugging_face_config(read_gguf(path))
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = path.read_bytes()
    path.write_bytes(original.replace(np.float32(divisors[18]).tobytes(), np.float32(30.0).tobytes()))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3\.1's scaling"):
        hugging_face_config(read_gguf(path))
    path.write_bytes(
        original.replace(np.array(divisors, dtype=np.float32).tobytes(), bytes(4 * len(divisors)))
    )
    with pytest.raises(ModelError, match=r"the values of rope_freqs\.weight must be at least 1"):
        hugging_face_config(read_gguf(path))


def test_llama_3_rope_with_another_factor_is_refused(tmp_path: Path) -> None:
    path = llama3_file(tmp_path / "m.gguf", llama3_divisors(32.0, 64, 5e5), factor=2.0)
    with pytest.raises(
        ModelError, match=r"rope_freqs\.weight together with llama\.rope\.scaling is not supported"
    ):
        hugging_face_config(read_gguf(path))


SIZES = {
    "block_count": 1,
    "context_length": 131072,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general__architecture": "bert"},
            r"architecture 'bert' is not supported; supported are llama, qwen2",
        ),
        ({"llama__expert_count": 8}, r"the metadata key llama\.expert_used_count is missing"),
        ({"llama__logit_scale": 16.0}, r"llama\.logit_scale \(16\.0\) is not supported"),
        ({"llama__attention__scale": 0.5}, r"llama\.attention\.scale \(0\.5\) is not supported"),
        (
            {"llama__rope__dimension_count": 8},
            r"llama\.rope\.dimension_count must equal the heads' size, 16, got 8",
        ),
        ({"llama__rope__scaling__type": "longrope"}, r"rope\.scaling\.type 'longrope' is not supported"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5},
            r"rope\.scaling\.yarn_ext_factor \(0\.5\) is not supported",
        ),
        ({"llama__rope__scaling__yarn_attn_factor": 2.0}, r"yarn_attn_factor \(2\.0\) is not supported"),
        (
            {"llama__rope__scaling__yarn_log_multiplier": 0.5},
            r"yarn_log_multiplier \(0\.5\) is not supported",
        ),
        ({"llama__rope__scaling__factor": 0.0}, r"rope\.scaling\.factor must be a positive number, got 0\.0"),
        ({"llama__embedding_length": None}, r"the metadata key llama\.embedding_length is missing"),
        ({"llama__block_count": 2**32 - 1}, r"llama\.block_count must be from 1 to 12, got 4,294,967,295"),
        ({"llama__feed_forward_length": 2**31}, r"feed_forward_length must be from 1 to 262,144"),
        ({"llama__attention__head_count": 0}, r"attention\.head_count must be from 1"),
        ({"llama__attention__head_count_kv": 0}, r"attention\.head_count_kv must be from 1"),
        ({"llama__attention__key_length": 1}, r"the heads' size must be even, got 1"),
        ({"llama__attention__head_count": 128, "llama__attention__key_length": None}, r"key_length must be"),
        (
            {"llama__attention__layer_norm_rms_epsilon": math.nan},
            r"epsilon must be a positive number, got nan",
        ),
        ({"llama__rope__freq_base": -1e4}, r"rope\.freq_base must be a positive number, got -10000\.0"),
        ({"split__count": 3}, r"is one of several parts; join them first: llama-gguf-split --merge"),
        ({"tokenizer__ggml__model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; supported are 'gpt2'"),
        (
            {"tokenizer__ggml__pre": "unheard-of"},
            r"tokenizer\.ggml\.pre is 'unheard-of', which is not supported",
        ),
        ({"tokenizer__ggml__bos_token_id": 300}, r"bos_token_id is 300, but there are 300 tokens"),
        (
            {"tokenizer__ggml__eos_token_id": 300},
            r"tokenizer\.ggml\.eos_token_id is 300, but there are 300 tokens",
        ),
        (
            {"tokenizer__ggml__eot_token_id": 300},
            r"tokenizer\.ggml\.eot_token_id is 300, but there are 300 tokens",
        ),
        (
            {"tokenizer__ggml__eom_token_id": 4096},
            r"tokenizer\.ggml\.eom_token_id is 4096, but there are 300 tokens",
        ),
        (
            {"tokenizer__ggml__merges": ["a b c"]},
            r"merges has 'a b c', which does not join two tokens into a token",
        ),
        (
            {"tokenizer__ggml__merges": ["a qqqq"]},
            r"merges has 'a qqqq', which does not join two tokens into a token",
        ),
        (
            {"tokenizer__ggml__token_type": [1, 3]},
            r"300 tokens, but 2 entries in tokenizer\.ggml\.token_type",
        ),
        (
            {"tokenizer__ggml__tokens": [str(i) for i in range(301)]},
            r"301 tokens, but token_embd\.weight has 300 rows",
        ),
        ({"tokenizer__ggml__tokens": None}, r"tokenizer\.ggml\.tokens must be a list of strings"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, source: Path, metadata: dict[str, Any], message: str
) -> None:
    path = make_gguf(tmp_path / "m.gguf", source, **metadata)
    with pytest.raises(ModelError, match=rf"m\.gguf.*{message}"):
        describe(path, tmp_path / "folder")


def test_keys_with_a_value_that_changes_nothing_are_no_obstacle(tmp_path: Path, source: Path) -> None:
    keys: dict[str, Any] = {
        "llama__expert_count": 0,
        "llama__attention__clamp_kqv": 0.0,
        "llama__attention__causal": True,
    }
    describe(make_gguf(tmp_path / "m.gguf", source, **keys), tmp_path / "folder")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["num_hidden_layers"] == 1


def test_stacks_of_experts_must_match_the_number_of_experts(tmp_path: Path) -> None:
    """Otherwise a damaged file would keep the loader busy with experts that it does not have."""
    model = make_model_dir(tmp_path / "model", "qwen3_moe", num_hidden_layers=1, **QWEN3_MOE)
    stack = "blk.0.ffn_up_exps.weight"
    for number, message in (
        (7, r"has shape \[6, \d+, \d+\], .* 7 experts"),
        (4097, "from 1 to 4,096, got 4,097"),
    ):
        with pytest.raises(ModelError, match=message):
            hugging_face_config(read_gguf(make_gguf(tmp_path / "m", model, qwen3moe__expert_count=number)))
    file = read_gguf(make_gguf(tmp_path / "m", model))
    hugging_face_config(file)
    for shape in ((6 * 32, 64), (7, 32, 64), (2**40, 1, 1)):
        tensors = file.tensors | {stack: replace(file.tensors[stack], shape=shape)}
        with pytest.raises(ModelError, match=r"ffn_up_exps\.weight has shape .* implies 6 experts"):
            hugging_face_config(replace(file, tensors=tensors))
    dense = read_gguf(make_gguf(tmp_path / "m", make_model_dir(tmp_path / "dense", num_hidden_layers=1)))
    with pytest.raises(ModelError, match="implies 0 experts"):
        hugging_face_config(replace(dense, tensors=dense.tensors | {stack: file.tensors[stack]}))
