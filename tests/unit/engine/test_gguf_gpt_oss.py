"""GGUF files of gpt-oss give transformers' tokens, and with MXFP4 the numbers of the safetensors checkpoint."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.config import BatonConfig, ModelConfig
from baton.errors import ModelError
from baton.sampling import SamplingParams
from engine.collectives import Collectives
from engine.eos_tokens import read_eos_token_ids
from engine.layers.backend import Matrix
from engine.layers.grouped_weight import GroupedWeight
from engine.loading.footprint import footprint
from engine.loading.gguf import read_gguf
from engine.loading.gguf_folder import describe, hugging_face_config
from engine.loading.gguf_weights import GgufWeights
from engine.loading.loader import LoadedModel, load_model, takes_of
from engine.loading.weights import Shard
from engine.model_config import read_architecture
from gateway.conversation import ChatMessage, Conversation
from gateway.conversation.formats.harmony import HarmonyFormat
from gateway.text.tokenizer import Tokenizer
from tests.factories.conversations import HARMONY
from tests.factories.families import GPT_OSS
from tests.factories.gguf_files import Kind, make_gguf, transformers_model
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import make_mxfp4
from tests.factories.stepping import StepDriver, load_on_cpu
from tests.factories.threaded_ranks import on_ranks
from tests.unit.engine.test_quantized_checkpoint import weights_of

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 40, 41, 200, 3, 9, 150, 17, 80]
"""Longer than the window."""
SIZES: dict[str, Any] = GPT_OSS | {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 2**-17,
}
"""Two ranks cut the blocks of 32 columns, but not groups of 16."""
EXPERT = "model.layers.1.mlp.experts.4"
SPECIAL = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), "gpt_oss", **SIZES)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The checkpoint in MXFP4."""
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), source)[0]


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory, quantized: Path) -> Path:
    """The GGUF file of this checkpoint, with its other matrices in Q8_0, as in published files."""
    return folder_of(tmp_path_factory.mktemp("gguf"), quantized, "Q8_0")


def folder_of(path: Path, model: Path, kind: Kind | str = "F32", **metadata: Any) -> Path:
    gguf, folder = make_gguf(path / "model.gguf", model, kind, **metadata), path / "folder"
    describe(gguf, folder)
    (folder / "model.gguf").symlink_to(gguf)
    return folder


def answer(model: LoadedModel) -> tuple[list[int], list[Any]]:
    """Tokens, and the largest logprobs with each."""
    driver = StepDriver(model)
    request = driver.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=99, logprobs=20))
    driver.step({"a": len(PROMPT)})
    for _ in range(7):
        driver.step({"a": 1})
    return request.outputs, request.logprobs


def check_transformers(folder: Path, **config: str) -> None:
    """Tokens and logprobs are those of transformers."""
    tokens, logprobs = answer(load_on_cpu(folder, **config))
    with torch.inference_mode():
        logits_TV = transformers_model(folder)(torch.tensor([[*PROMPT, *tokens[:-1]]])).logits[0]
    expected_TV = logits_TV[len(PROMPT) - 1 :].log_softmax(-1)
    assert tokens == expected_TV.argmax(-1).tolist()
    for found, expected_V in zip(logprobs, expected_TV, strict=True):
        for token_id, logprob in found.top:
            assert logprob == pytest.approx(float(expected_V[token_id]), abs=1e-4)


def test_without_groups_answers_are_those_of_the_original_folder(tmp_path: Path, source: Path) -> None:
    folder = folder_of(tmp_path, source)
    assert read_architecture(folder) == read_architecture(source)
    assert answer(load_on_cpu(folder)) == answer(load_on_cpu(source))
    check_transformers(folder)


def test_groups_that_become_numbers_give_transformers_answers(mxfp4: Path) -> None:
    """MXFP4 and Q8_0."""
    check_transformers(mxfp4, quantization="none")


@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "fp8"])
def test_mxfp4_is_that_of_the_checkpoint_to_the_bit(
    tmp_path: Path, quantized: Path, quantization: str
) -> None:
    folder = folder_of(tmp_path, quantized)
    assert answer(load_on_cpu(folder, quantization=quantization)) == answer(
        load_on_cpu(quantized, quantization=quantization)
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_parts_of_experts_are_those_of_the_checkpoint(mxfp4: Path, quantized: Path, keeps: bool) -> None:
    """This includes shares that cut blocks. Such a share stays in groups of 16, or becomes numbers."""
    gate_ups, downs = f"{EXPERT}.gate_up_proj", f"{EXPERT}.down_proj"
    halves, quarter = [None, Shard(0, first=160, size=160)], Shard(1, 0, 4)
    ours = GgufWeights(mxfp4 / "model.gguf", torch.float32, CPU, 16, keeps_groups=keeps)
    with weights_of(quantized, keeps=keeps) as theirs:
        for shard in halves:
            found, expected = (
                source.take_interleaved(f"{gate_ups}.weight", 320, 96, shard=shard)
                for source in (ours, theirs)
            )
            check_equal(found[0], expected[0])
            check_equal(found[1], expected[1])
            biases = [source.take_tensor(f"{gate_ups}.bias", 320, shard=shard) for source in (ours, theirs)]
            assert torch.equal(*biases)
        for shard in (None, Shard(0, 1, 2), Shard(1, 1, 2), quarter):
            found_down, expected_down = (
                source.take_matrix(f"{downs}.weight", 96, 160, shard=shard) for source in (ours, theirs)
            )
            check_equal(found_down, expected_down)
        assert torch.equal(*(source.take_tensor(f"{downs}.bias", 96) for source in (ours, theirs)))


def check_equal(found: Matrix, expected: Matrix) -> None:
    if isinstance(found, GroupedWeight):
        assert isinstance(expected, GroupedWeight)
        assert found.kind == expected.kind
        found, expected = found.dequantized(), expected.dequantized()
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_have_the_shares_of_the_checkpoint(
    tmp_path: Path, quantized: Path, expert_parallel: bool
) -> None:
    """The shares are equal to the bit, although they cut blocks without whole experts."""

    def on_rank(collectives: Collectives, folder: Path) -> tuple[list[int], list[Any]]:
        config = ModelConfig(dtype="float32")
        return answer(
            load_model(config, folder, CPU, collectives=collectives, expert_parallel=expert_parallel)
        )

    ours, theirs = (
        on_ranks(2, partial(on_rank, folder=each)) for each in (folder_of(tmp_path, quantized), quantized)
    )
    assert ours == theirs


def test_exponents_that_kernels_do_not_represent_become_numbers(tmp_path: Path, quantized: Path) -> None:
    folder = folder_of(tmp_path, quantized)
    file = folder / "model.gguf"
    place = read_gguf(file).tensors["blk.1.ffn_up_exps.weight"].part(4)
    content = np.fromfile(file, np.uint8)
    content[place.offset] -= 60
    (tmp_path / "model.gguf").write_bytes(content.tobytes())
    weights = GgufWeights(file, torch.float32, CPU, 16, keeps_groups=True)
    gate, up = weights.take_interleaved(f"{EXPERT}.gate_up_proj.weight", 320, 96)
    assert isinstance(gate, GroupedWeight)
    assert isinstance(up, torch.Tensor)


def test_gates_and_ups_may_have_different_types(tmp_path: Path, source: Path) -> None:
    def kind(name: str) -> str:
        return "Q8_0" if "up_exps" in name else "MXFP4" if "exps" in name else "F32"

    folder = folder_of(tmp_path, source, kind)
    check_transformers(folder, quantization="none")
    found, expected = (
        answer(load_on_cpu(folder, quantization=quantization)) for quantization in ("auto", "none")
    )
    assert found[0][0] == expected[0][0]
    wanted = dict(expected[1][0].top)
    alike = [(logprob, wanted[token_id]) for token_id, logprob in found[1][0].top if token_id in wanted]
    assert len(alike) > len(wanted) / 2
    assert all(logprob == pytest.approx(other, abs=0.1) for logprob, other in alike)


def test_a_missing_and_an_unexpected_tensor_are_named(tmp_path: Path, mxfp4: Path) -> None:
    file = mxfp4 / "model.gguf"
    content = file.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content.replace(b"blk.1.attn_sinks.weight", b"blk.1.attn_sinkz.weight"))
    open_weights = partial(GgufWeights, broken, torch.float32, CPU, 16, keeps_groups=True)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_sinks\.weight \(shape \[4\]\) is missing"):
        open_weights(takes=takes_of(read_architecture(mxfp4)))
    broken.write_bytes(content.replace(b"blk.1.ffn_gate_exps.bias", b"blk.1.ffn_gate_exps.bios"))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_gate_exps\.\d\.bias|implies 6 experts"):
        open_weights(takes=takes_of(read_architecture(mxfp4)))
    whole = read_gguf(file)
    tensors = {name: tensor for name, tensor in whole.tensors.items() if name != "output.weight"}
    with pytest.raises(ModelError, match=r"tensor output\.weight is missing"):
        hugging_face_config(replace(whole, tensors=tensors))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention__sliding_window_pattern": 4}, r"attention\.sliding_window_pattern \(4\) is not supp"),
        ({"attention__sliding_window": None}, r"key gpt-oss\.attention\.sliding_window is missing"),
        ({"rope__freq_base_swa": 1e4}, r"rope\.freq_base_swa \(10000\.0\) is not supported; only 150000\.0"),
        ({"attention__key_length_swa": 8}, r"attention\.key_length_swa must equal the heads' size, 16"),
        ({"swiglu_clamp_exp": 7.0}, r"swiglu_clamp_exp \(7\.0\) is not supported"),
        (
            {"expert_count": 7},
            r"ffn_\w+_exps\.\w+ has shape \[6, .*implies 7 experts, a (matrix|vector) each",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, source: Path, metadata: dict[str, Any], message: str
) -> None:
    keys = {f"gpt-oss__{key}": value for key, value in metadata.items()}
    with pytest.raises(ModelError, match=message):
        folder_of(tmp_path, source, **keys)


def test_keys_that_other_converters_leave_out_have_llama_cpps_defaults(tmp_path: Path, source: Path) -> None:
    keys: dict[str, Any] = {
        "gpt-oss__feed_forward_length": None,
        "gpt-oss__rope__scaling__yarn_beta_fast": 32.0,
        "gpt-oss__rope__scaling__yarn_beta_slow": 1.0,
        "gpt-oss__attention__sliding_window_pattern": 2,
        "gpt-oss__rope__freq_base_swa": 150_000.0,
    }
    config = hugging_face_config(read_gguf(make_gguf(tmp_path / "m.gguf", source, **keys)))
    assert config["intermediate_size"] == 160
    assert read_architecture(folder_of(tmp_path, source, **keys)) == read_architecture(source)


def test_the_template_chooses_harmony_and_its_turns_end_answers(tmp_path: Path) -> None:
    """`<|end|>` ends only a message, though keys name it."""
    source = make_model_dir(tmp_path / "source", "gpt_oss", **SIZES | {"vocab_size": 320})
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens, first = sorted(vocabulary, key=vocabulary.__getitem__), len(vocabulary)
    words: dict[str, Any] = {
        "pre": "gpt-4o",
        "tokens": [*tokens, *SPECIAL],
        "token_type": [*(3 if token in ("<pad>", "<s>") else 1 for token in tokens), *(3 for _ in SPECIAL)],
        "eos_token_id": first + 2,
        "eot_token_id": first + 2,
    }
    keys = {f"tokenizer__ggml__{key}": value for key, value in words.items()}
    folder = folder_of(tmp_path, source, tokenizer__chat_template=HARMONY, **keys)
    assert {first, first + 1} <= set(read_eos_token_ids(folder))
    assert first + 2 not in read_eos_token_ids(folder)
    tokenizer = Tokenizer(folder)
    assert isinstance(tokenizer.answer_format, HarmonyFormat)
    chat = tokenizer.encode(tokenizer.render_chat(Conversation((ChatMessage("user", "What?"),))))
    assert chat[0] == first + 3, "one token, and none before"
    assert chat.count(first + 3) == 3


@pytest.mark.parametrize(
    ("num_ranks", "expert_parallel", "bits_of_downs"),
    [(1, False, 4.5), (2, False, 5.5), (4, False, 32), (4, True, 4.5)],
)
def test_the_footprint_counts_groups_that_ranks_would_cut(
    tmp_path: Path, num_ranks: int, expert_parallel: bool, bits_of_downs: float
) -> None:
    """A half of 96 columns is a multiple of 16, but a quarter is not."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_key_value_heads": 4, "vocab_size": 300}
    source = make_model_dir(tmp_path / "source", "gpt_oss", **SIZES | sizes)
    folder = folder_of(tmp_path, make_mxfp4(tmp_path / "mxfp4", source)[0])
    values = {"tensor_parallel": num_ranks, "enable_expert_parallel": expert_parallel}
    config = BatonConfig.from_mapping({"model": {"dtype": "float32"}, "engine": values})
    takes = footprint(config, folder)
    assert takes.weights is not None
    downs, gate_ups = 2 * 6 * 128 * 96, 2 * 6 * 2 * 128 * 96
    others = takes.weights.num_parameters - downs - gate_ups
    bits = 4.5 * gate_ups + bits_of_downs * downs
    assert takes.weight_bytes == pytest.approx(bits / 8 + 4 * others, rel=0.01)
