"""GGUF files of families with keys, tensors or rules of their own give transformers' tokens and logits."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.config import ModelConfig
from baton.errors import ModelError
from baton.sampling import MAX_LOGPROBS, SamplingParams
from engine.collectives import Collectives
from engine.loading.gguf import GgufTensor, read_gguf
from engine.loading.gguf_folder import describe, hugging_face_config
from engine.loading.gguf_weights import GgufWeights
from engine.loading.loader import LoadedModel, load_model
from engine.loading.stored_weights import read_weights
from engine.model_config import read_architecture
from tests.factories.families import GLM4_MOE, MINIMAX_M2, YARN, longrope
from tests.factories.gguf_files import ARCHITECTURES, Kind, make_gguf
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 40, 41, 200, 3, 8, 9, 10, 77]
SMALL_EPS = 2**-17


@dataclass(frozen=True)
class Case:
    """A model, as arguments for `make_model_dir` and `make_gguf`."""

    architecture: str
    overrides: dict[str, Any] = field(default_factory=dict)
    has_stacks: bool = True


MIXTRAL = {"num_local_experts": 5, "num_hidden_layers": 2}
GRANITE = {
    "attention_multiplier": 0.125,
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.375,
}
OLMO3 = {
    "num_hidden_layers": 4,
    "sliding_window": 4,
    "rope_parameters": {
        "full_attention": {**YARN, "attention_factor": 1.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
LONGROPE = longrope(1.5, 30.0, attention_factor=1.25)
CASES = {
    "mixtral": Case("mixtral", MIXTRAL),
    "mixtral, window, a tensor for each expert": Case(
        "mixtral", MIXTRAL | {"sliding_window": 4, "num_experts_per_tok": 1}, has_stacks=False
    ),
    "phi3": Case("phi3", {"num_hidden_layers": 2}),
    "phi3, window, a part of a head rotated": Case(
        "phi3",
        {
            "sliding_window": 4,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "phi3, longrope, short": Case("phi3", LONGROPE | {"original_max_position_embeddings": 1024}),
    "phi3, longrope, long": Case("phi3", LONGROPE | {"original_max_position_embeddings": 4}),
    "smollm3, biased": Case(
        "smollm3", {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
    ),
    "olmo2": Case("olmo2", {"num_hidden_layers": 2}),
    "olmo3": Case("olmo3", OLMO3),
    "olmo3, another pattern": Case(
        "olmo3",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "num_hidden_layers": 2},
    ),
    "granite": Case("granite", GRANITE | {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "glm4": Case("glm4", {"head_dim": 16, "num_hidden_layers": 2}),
    "glm4 moe": Case("glm4_moe", GLM4_MOE | {"use_qk_norm": True, "attention_bias": True}),
    "glm4 moe, not normalized, two shared": Case(
        "glm4_moe", GLM4_MOE | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0}
    ),
    "minimax m2": Case("minimax_m2", MINIMAX_M2 | {"num_hidden_layers": 2}),
    "glm4, all of a head rotated, not biased": Case(
        "glm4",
        {
            "head_dim": 32,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
}


def folder_of(path: Path, source: Path, case: Case, kind: Kind | str = "F32", **metadata: Any) -> Path:
    """The folder that `--model FILE.gguf` makes of the source's file."""
    path.mkdir(exist_ok=True)
    file = make_gguf(path / "model.gguf", source, kind, has_stacks=case.has_stacks, **metadata)
    describe(file, path / "folder")
    (path / "folder" / "model.gguf").symlink_to(file)
    return path / "folder"


def source_of(path: Path, case: Case, **sizes: int) -> Path:
    return make_model_dir(
        path / "source", case.architecture, rms_norm_eps=SMALL_EPS, **case.overrides, **sizes
    )


def load(path: Path, quantization: str = "none") -> LoadedModel:
    return load_model(
        ModelConfig.model_validate({"dtype": "float32", "quantization": quantization}), path, CPU
    )


def tokens(model: LoadedModel) -> list[int]:
    return StepDriver(model).generate({"a": PROMPT}, 6)["a"]


@torch.inference_mode()
def check(folder: Path, reference: Path) -> None:
    """The folder's tokens and logits are those that transformers computes from the reference."""
    driver = StepDriver(load(folder))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=MAX_LOGPROBS)
    request = driver.add("a", PROMPT, params)
    while len(request.outputs) < 6:
        driver.step({"a": min(7, request.num_tokens - request.num_computed)})
    theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    whole = theirs(torch.tensor([[*PROMPT, *request.outputs]])).logits[0]
    logits = whole[len(PROMPT) - 1 : -1]
    assert request.outputs == logits.argmax(-1).tolist()
    for position, logprobs in enumerate(request.logprobs):
        token_ids, values = zip(*logprobs.top, strict=True)
        expected = logits[position].log_softmax(-1)[list(token_ids)]
        torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source = source_of(tmp_path, case)
    folder = folder_of(tmp_path, source, case)
    assert read_architecture(folder) == read_architecture(source)
    check(folder, source)


def rounded(path: Path, source: Path, kind: str) -> Path:
    """Copies the source to `path`, with its matrices as a GGUF file of this kind stores them, rounded."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    quantization = gguf.GGMLQuantizationType[kind]
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            numbers = gguf.dequantize(gguf.quantize(tensor.numpy(), quantization), quantization)
            tensors[name] = torch.from_numpy(numbers)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    "name", ["mixtral", "phi3", "smollm3, biased", "olmo2", "olmo3", "granite", "gemma2", "glm4"]
)
def test_quantized_files(tmp_path: Path, name: str) -> None:
    """Dequantized matrices give transformers' tokens. With matrices in the file's bits, two ranks give the
    tokens of one."""
    case = CASES[name]
    source = source_of(tmp_path, case, hidden_size=128, intermediate_size=128)
    folder = folder_of(tmp_path, source, case, "Q8_0")
    check(folder, rounded(tmp_path / "rounded", source, "Q8_0"))
    alone = tokens(load(folder, "auto"))

    def on_rank(collectives: Collectives) -> list[int]:
        return tokens(load_model(ModelConfig(dtype="float32"), folder, CPU, collectives=collectives))

    assert on_ranks(2, on_rank) == [alone, alone]


def test_bytes_of_experts_are_counted_in_either_form(tmp_path: Path) -> None:
    """Ranks with whole experts read only these bytes in part."""
    case = CASES["mixtral"]
    source = source_of(tmp_path, case)
    expected = 4 * 3 * 64 * 128 * 5 * 2
    tensors: dict[str, GgufTensor] = {}
    for has_stacks in (True, False):
        at = tmp_path / str(has_stacks)
        at.mkdir()
        folder = folder_of(at, source, Case(case.architecture, has_stacks=has_stacks))
        weights = read_weights(folder, read_architecture(folder))
        assert weights is not None
        assert weights.num_expert_bytes == expected
        file = read_gguf(at / "model.gguf")
        tensors |= file.tensors
    with pytest.raises(ModelError, match="some tensors have all experts of a layer, others only one"):
        hugging_face_config(replace(file, tensors=tensors))
    name = f"blk.0.ffn_up.{'9' * 5_000}.weight"
    tensors = file.tensors | {name: replace(file.tensors["blk.0.ffn_up.1.weight"], name=name)}
    with pytest.raises(ModelError, match="implies 5 experts"):
        hugging_face_config(replace(file, tensors=tensors))


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mixtral": [
        ({"expert_used_count": 6}, r"num_experts_per_tok must be at most the number of experts, 5, got 6"),
        ({"nextn_predict_layers": 1}, r"llama\.nextn_predict_layers \(1\) is not supported"),
        ({"attention__head_count_kv": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value"),
    ],
    "phi3": [
        ({"rope__dimension_count": 7}, r"phi3\.rope\.dimension_count must be even, got 7"),
        ({"rope__dimension_count": 18}, r"rope\.dimension_count must be from 1 to 16, got 18"),
        ({"rope__scaling__attn_factor": 1.5}, r"attn_factor \(1\.5\) .* without rope_factors_short"),
        ({"rope__scaling__factor": 2.0}, r"a rotation of type 'linear' is not supported for phi3"),
        ({"rope__scaling__type": "longrope"}, r"tensor rope_factors_short\.weight is missing"),
        (
            {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0},
            r"rope\.scaling\.type 'longrope' is not supported",
        ),
    ],
    "olmo2": [
        (
            {"rope__scaling__yarn_attn_factor": 2.0},
            r"yarn_attn_factor \(2\.0\) is not supported without YaRN",
        ),
    ],
    "olmo3": [
        ({"attention__sliding_window_pattern": 3}, r"pattern \(3\) must have a value for each of 4 layers"),
        (
            {"attention__sliding_window_pattern": [True]},
            r"pattern \(\[True\]\) must have a value for each of 4",
        ),
        ({"rope__scaling__yarn_ext_factor": 2.0}, r"yarn_ext_factor \(2\.0\) is not supported"),
        ({"rope__scaling__attn_factor": 2.0}, r"attn_factor and olmo2.*must be equal; got \[2\.0, 1\.25\]"),
    ],
    "granite": [
        ({"expert_count": 8}, r"granite\.expert_count \(8\) is not supported"),
        ({"logit_scale": None}, r"the metadata key granite\.logit_scale is missing"),
        ({"embedding_scale": False}, r"granite\.embedding_scale must be of type float, got False"),
        ({"residual_scale": -1.0}, r"granite\.residual_scale must be a positive number"),
        ({"rope__scaling__finetuned": False}, r"finetuned \(False\), a model without a rotation"),
    ],
    "gemma2": [
        ({"attention__sliding_window_pattern": 3}, r"sliding_window_pattern \(3\) is not supported"),
        ({"rope__freq_base_swa": 5.0}, r"gemma2\.rope\.freq_base_swa \(5\.0\) must equal gemma2\.rope"),
        ({"final_logit_softcapping": 0.0}, r"final_logit_softcapping must be a positive number"),
    ],
    "glm4 moe": [
        (
            {"expert_gating_func": 1},
            r"glm4moe\.expert_gating_func \(1\) is not supported; only 2 \(sigmoid\) is",
        ),
        ({"nextn_predict_layers": 4}, r"nextn_predict_layers \(4\) must be less than glm4moe\.block_count"),
        ({"expert_count": 9}, r"_exps\.weight has shape .*implies 9 experts"),
    ],
    "minimax m2": [
        ({"expert_gating_func": 1}, r"minimax-m2\.expert_gating_func \(1\) is not supported"),
        ({"expert_weights_scale": 2.0}, r"expert_weights_scale \(2\.0\) is not supported"),
    ],
    "glm4": [
        ({"rope__dimension_sections": [2, 3, 3, 0]}, r"glm4\.rope\.dimension_sections .* is not supported"),
        ({"nextn_predict_layers": 1}, r"glm4\.nextn_predict_layers \(1\) is not supported"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source = source_of(tmp_path, case)
    for metadata, message in REFUSED[name]:
        keys = {f"{ARCHITECTURES[case.architecture]}__{key}": value for key, value in metadata.items()}
        with pytest.raises(ModelError, match=rf"model\.gguf.*{message}"):
            folder_of(tmp_path, source, case, **keys)


def test_divisors_of_longrope_belong_together(tmp_path: Path) -> None:
    """They are used whether or not the file names the kind of scaling."""
    case = CASES["phi3, longrope, long"]
    source = source_of(tmp_path, case)
    file = read_gguf(make_gguf(tmp_path / "model.gguf", source))
    named = replace(file, metadata=file.metadata | {"phi3.rope.scaling.type": "longrope"})
    assert hugging_face_config(named) == hugging_face_config(file)
    name = "rope_factors_short.weight"
    embeddings = replace(file.tensors[name], offset=file.tensors["token_embd.weight"].offset)
    with pytest.raises(ModelError, match=rf"the values of {name} must be positive numbers"):
        hugging_face_config(replace(file, tensors=file.tensors | {name: embeddings}))
    tensors = {key: value for key, value in file.tensors.items() if key != "rope_factors_long.weight"}
    with pytest.raises(ModelError, match=r"tensor rope_factors_long\.weight is missing"):
        hugging_face_config(replace(file, tensors=tensors))


def test_phi_3_for_4096_positions_has_a_window_without_the_key(tmp_path: Path) -> None:
    """llama.cpp did the same until 2025. Files of Phi-4 say that the model has no window."""
    source = make_model_dir(tmp_path / "source", "phi3", num_hidden_layers=1, max_position_embeddings=4096)
    file = read_gguf(make_gguf(tmp_path / "m.gguf", source))
    assert hugging_face_config(file)["sliding_window"] == 2047
    without = replace(file, metadata=file.metadata | {"phi3.attention.sliding_window": 0})
    assert "sliding_window" not in hugging_face_config(without)


def test_granite_without_optional_keys_has_llama_cpps_defaults(tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "source", "granite", num_hidden_layers=1)
    keys: dict[str, Any] = {
        "granite__attention__scale": 0.0,
        "granite__embedding_scale": None,
        "granite__residual_scale": None,
    }
    config = hugging_face_config(read_gguf(make_gguf(tmp_path / "m.gguf", source, **keys)))
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    assert [config[name] for name in names] == [0.25, 1.0, 1.0]


def test_gemma_2_without_optional_keys_has_the_values_of_all_its_models(tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "source", "gemma2", num_hidden_layers=46, hidden_size=32, head_dim=16)
    keys: dict[str, Any] = {
        "gemma2__attn_logit_softcapping": None,
        "gemma2__final_logit_softcapping": None,
        "gemma2__attention__sliding_window": None,
    }
    config = hugging_face_config(read_gguf(make_gguf(tmp_path / "m.gguf", source, **keys)))
    names = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "query_pre_attn_scalar")
    assert [config[name] for name in names] == [50.0, 30.0, 4096, 32 // 4], "46 layers: the largest model"


def test_olmo_3_without_a_pattern_has_llama_cpps(tmp_path: Path) -> None:
    source = source_of(tmp_path, CASES["olmo3"])
    for pattern in (None, 4):
        file = make_gguf(tmp_path / "m.gguf", source, olmo2__attention__sliding_window_pattern=pattern)
        kinds = hugging_face_config(read_gguf(file))["layer_types"]
        assert kinds == ["sliding_attention"] * 3 + ["full_attention"]


def test_olmo_3s_factor_may_have_the_older_key(tmp_path: Path) -> None:
    """llama.cpp's converter wrote this key when OLMo 3 appeared, and Ollama's converter still writes it."""
    source = source_of(tmp_path, CASES["olmo3"])
    newer = hugging_face_config(read_gguf(make_gguf(tmp_path / "m.gguf", source)))
    keys: dict[str, Any] = {
        "olmo2__rope__scaling__attn_factor": 1.25,
        "olmo2__rope__scaling__yarn_attn_factor": None,
    }
    older = hugging_face_config(read_gguf(make_gguf(tmp_path / "m.gguf", source, **keys)))
    assert older["rope_parameters"] == newer["rope_parameters"]
    assert older["rope_parameters"]["full_attention"]["attention_factor"] == 1.25


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    source = source_of(tmp_path, CASES["glm4 moe"])
    alone = folder_of(tmp_path, source, CASES["glm4 moe"])
    tensors = load_file(source / "model.safetensors")
    guessing = {
        f"model.layers.3.{name}.weight": torch.ones(64, 64) for name in ("eh_proj", "self_attn.o_proj")
    }
    save_file(tensors | guessing, source / "model.safetensors", {"format": "pt"})
    folder = folder_of(tmp_path / "more", source, CASES["glm4 moe"])
    assert read_architecture(folder) == read_architecture(alone)
    assert read_weights(folder, read_architecture(folder)) == read_weights(alone, read_architecture(alone))
    assert tokens(load(folder)) == tokens(load(alone))


def test_routers_are_not_rounded_to_the_models_type(tmp_path: Path) -> None:
    source = source_of(tmp_path, CASES["minimax m2"])
    folder, stored = folder_of(tmp_path, source, CASES["minimax m2"]), load_file(source / "model.safetensors")
    weights = GgufWeights(folder / "model.gguf", torch.bfloat16, CPU, 16, keeps_groups=False)
    for name in ("gate.weight", "e_score_correction_bias"):
        name = f"model.layers.1.block_sparse_moe.{name}"
        assert torch.equal(weights.take_float32(name, *stored[name].shape), stored[name].to(torch.float32))
