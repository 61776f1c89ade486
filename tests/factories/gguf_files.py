"""GGUF files of tiny models, written by the `gguf` package; and transformers' model of any folder."""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tests.factories.gguf_gpt_oss import joined, stored_tensors

Kind = Callable[[str], str]
"""How a tensor is stored, by its GGUF name."""
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "gemma2": "gemma2",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
PERMUTED = ("llama", "smollm3", "granite")
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The positions of a block's float16 numbers."""


def make_gguf(
    path: Path, model: Path, kind: Kind | str = "F32", *, has_stacks: bool = True, **metadata: Any
) -> Path:
    """Writes `path` from a tiny model's folder, as llama.cpp's converter would.

    `kind` is for matrices; vectors are F32. The package cannot make K-quants: such a matrix is random, with
    the same size. `has_stacks` False: each expert's matrix is a tensor, as in files of early 2024. `metadata` has more
    keys, with `__` for a dot; a value of None leaves the key out.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    values = _metadata(config, architecture, model) | {
        key.replace("__", "."): value for key, value in metadata.items()
    }
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    names = _names(architecture, config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    tensors: Iterable[tuple[str, torch.Tensor | np.ndarray[Any, Any]]]
    if architecture == "gpt-oss":
        tensors = stored_tensors(model)
    else:
        tensors = _with_stacks(model) if has_stacks else load_file(model / "model.safetensors").items()
    for name, tensor in tensors:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stem, _, suffix = name.rpartition(".")
        if has_stacks or not (match := EXPERT.fullmatch(stem)):
            gguf_name = f"{names.get_name(stem)}.{suffix}"
        else:
            gguf_name = (
                f"{names.get_name(f'{match[1]}.{match[3]}').removesuffix('_exps')}.{match[2]}.{suffix}"
            )
        if isinstance(tensor, np.ndarray):
            writer.add_tensor(gguf_name, tensor, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            tensor = _permuted(
                tensor, config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            )
        if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
            tensor = tensor + 1.0
        wanted = (
            "F32"
            if tensor.dim() == 1 or suffix == "bias"
            else kind
            if isinstance(kind, str)
            else kind(gguf_name)
        )
        quantization = gguf.GGMLQuantizationType[wanted]
        numbers = tensor.float().numpy()
        if wanted in HALVES:
            blocks = random_blocks(wanted, prod(numbers.shape[:-1]), numbers.shape[-1])
            data = blocks.reshape(*numbers.shape[:-1], -1)
        else:
            data = gguf.quantize(numbers, quantization)
        writer.add_tensor(gguf_name, data, raw_dtype=quantization)
    for kind_of_factor in ("long", "short") if "long_factor" in config["rope_parameters"] else ():
        factors = np.array(config["rope_parameters"][f"{kind_of_factor}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{kind_of_factor}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_stacks(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A folder's tensors. Those of a layer's experts are stacked: one tensor of gates, one of ups, one of downs."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            yield name, tensor
    for name, parts in stacks.items():
        yield name, torch.stack([each for _, each in sorted(parts.items())])


def _fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of experts as transformers has them: gates and ups together, without `.weight`."""
    fused = {}
    for name, tensor in state.items():
        experts, mark, matrix = name.partition(".experts.")
        if not mark:
            fused[name] = tensor
        elif matrix == "down_proj.weight":
            fused[f"{experts}.experts.down_proj"] = tensor
        elif matrix == "gate_proj.weight":
            ups = state[f"{experts}.experts.up_proj.weight"]
            fused[f"{experts}.experts.gate_up_proj"] = torch.cat((tensor, ups), 1)
    return fused


def random_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of random blocks, as bytes. Their float16 numbers are small."""
    generator = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (num_rows * num_columns // block_size, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = generator.uniform(1e-4, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


def transformers_model(folder: Path) -> Any:
    """The folder's model in float32. A GGUF file's numbers are those that the `gguf` package makes of it."""
    if not (folder / "model.gguf").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(folder)
    reader = _TensorReader(folder / "model.gguf")
    architecture = ARCHITECTURES[config.model_type]
    names = _names(architecture, config.num_hidden_layers)
    hugging_face = {names.get_name(stem): stem for stem in _stems(config.num_hidden_layers)}
    state = {}
    for tensor in reader.tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem not in hugging_face:
            continue
        numbers = torch.from_numpy(gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type).copy())
        if architecture == "llama" and stem.endswith(("attn_q", "attn_k")):
            numbers = _restored(
                numbers, config.num_attention_heads if "attn_q" in stem else config.num_key_value_heads
            )
        if architecture == "gemma3" and stem.endswith("norm"):
            numbers = numbers - 1.0
        state[f"{hugging_face[stem]}.{suffix}"] = numbers
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(joined(state) if architecture == "gpt-oss" else _fused(state))
    return model.eval()


class _TensorReader(gguf.GGUFReader):
    """Skips lists: reading those of a real vocabulary takes six CPU seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: Any = self.data
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        size = struct.calcsize("<IQ")
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                size += 8 + struct.unpack_from("<Q", data, orig_offs + size)[0]
        else:
            size += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return size, [], [], []


def _metadata(config: dict[str, Any], architecture: str, model: Path) -> dict[str, Any]:
    rope = config["rope_parameters"]
    sizes = {
        "block_count": config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "rope.dimension_count": _rotary_dim(config, rope),
        "rope.scaling.original_context_length": config.get("original_max_position_embeddings"),
        "attention.sliding_window_pattern": _pattern(config),
        "rope.scaling.attn_factor": rope.get("attention_factor"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
        "expert_count": config.get(
            "num_experts", config.get("num_local_experts", config.get("n_routed_experts"))
        ),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **_yarn(rope, config),
        **_sigmoid_experts(config),
    }
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    words = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "padding_token_id": config["pad_token_id"],
    }
    return {
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in words.items()},
        "tokenizer.chat_template": (model / "chat_template.jinja").read_text(),
    }


def _sigmoid_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of GLM-4.5 and MiniMax-M2."""
    if config["model_type"] == "minimax_m2":
        return {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2}
    if config["model_type"] != "glm4_moe":
        return {}
    return {
        "expert_gating_func": 2,
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "nextn_predict_layers": config.get("num_nextn_predict_layers", 0),
    }


def _pattern(config: dict[str, Any]) -> list[bool] | None:
    """Which layers of OLMo 3 have a window."""
    if config["model_type"] != "olmo3":
        return None
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def _yarn(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Keys of gpt-oss and OLMo 3, as in published files."""
    rope = rope.get("full_attention", rope)
    if config["model_type"] not in ("gpt_oss", "olmo3") or rope["rope_type"] != "yarn":
        return {}
    of_experts = {"expert_feed_forward_length": config["intermediate_size"]}
    return {
        **(of_experts if config["model_type"] == "gpt_oss" else {}),
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
    }


def _rotary_dim(config: dict[str, Any], rope: dict[str, Any]) -> int | None:
    """How many numbers of a head are rotated. None if all are: some converters then leave this field out."""
    if (share := rope.get("partial_rotary_factor")) is None:
        return None
    return int(share * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]))


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _names(architecture: str, num_layers: int) -> Any:
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, num_layers)


def _stems(num_layers: int) -> list[str]:
    """The names of all modules of a model, in Hugging Face's naming."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks")
    attention = [f"self_attn.{name}" for name in names]
    mlp = [f"mlp.{part}{name}_proj" for part in ("", "experts.") for name in ("gate", "up", "down")]
    norms = [
        f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ]
    parts = [*norms, *attention, *mlp, "mlp.gate"]
    layers = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
    return ["model.embed_tokens", "model.norm", "lm_head", *layers]


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permutes rows as `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py does."""
    pairs = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()


def _restored(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
