"""Describes a GGUF file as a Hugging Face folder: writes its metadata as the usual files; copies no weights.

FOLDER/config.json, generation_config.json                      the architecture
FOLDER/tokenizer.json, tokenizer_config.json, chat_template.jinja
FOLDER/additional_chat_templates/tool_use.jinja                 if the file has a template for tools
FOLDER/model.gguf                                               the file itself, or a link to it
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from baton.errors import ModelError
from engine.families import ARCHITECTURES as FAMILIES
from engine.loading.gguf import GgufFile, read_gguf
from engine.loading.gguf_families import completed
from engine.loading.gguf_keys import floats_in, positive_in, size_in
from engine.loading.gguf_tokenizer import special_token_ids, special_tokens, tokenizer_json
from engine.loading.model_files import TEMPLATES_FOLDER
from engine.model_config import architecture_of

MODEL_FILE = "model.gguf"
LAYOUT = 4
"""Version of the written files; a folder of an older version is made again."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}
"""`general.architecture` -> `architectures[0]` of a config.json."""
VALUES_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "swiglu_clamp_exp": (),
    "embedding_scale": (1.0,),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change what a model computes. With the listed values they change nothing; other values are
refused."""
HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)
"""Metadata keys whose values must equal the size of a head's key in layers without a window."""
EXPERTS = re.compile(r"(?:_exps|\.ffn_(?:gate|up|down)\.(\d+))\.")
"""Part of the names of tensors that have all experts of a layer or, in older files of Mixtral, one expert."""
KEYS_READ = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("final_logit_softcapping",),
    "glm4moe": (
        "expert_count",
        "expert_gating_func",
        "expert_shared_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "leading_dense_block_count",
        "nextn_predict_layers",
    ),
    "granite": ("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    "llama": ("expert_count",),
    "minimax-m2": ("expert_count", "expert_gating_func"),
    "olmo2": ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"),
    "phi3": ("rope.scaling.attn_factor",),
    "qwen3moe": ("expert_count",),
    "gpt-oss": ("expert_count",),
}
"""The keys of VALUES_WITHOUT_EFFECT that an architecture supports with any value."""
INTERMEDIATE_SIZE = dict.fromkeys(("gpt-oss", "minimax-m2"), "expert_feed_forward_length")
"""The key of `intermediate_size`, where it is not `feed_forward_length`."""
WITH_WINDOW = {"llama": "MistralForCausalLM", "olmo2": "Olmo3ForCausalLM"}
"""`architectures[0]` of a config.json, for architectures whose files with a sliding window are of another family."""
WINDOWED = ("llama", "gemma2", "gemma3", "gpt-oss", "olmo2", "phi3")
"""Architectures that may have a sliding window."""
PARTLY_ROTATED = ("glm4", "glm4moe", "minimax-m2", "phi3")
"""Architectures that may rotate only the first numbers of a head."""
NEVER_TIED = ("gpt-oss", "minimax-m2", "olmo2")
"""Architectures whose embeddings are never also the projection to logits. The file must have the projection's tensor,
also for llama.cpp."""


def gguf_of(folder: Path) -> Path | None:
    """The GGUF file of a folder; None if it has no such file, or also has safetensors files."""
    file = folder / MODEL_FILE
    is_there = file.is_file() or file.is_symlink()  # a broken link is reported when it is read
    return file if is_there and not any(folder.glob("*.safetensors")) else None


def describe(gguf: Path, folder: Path) -> None:
    """Writes the folder's files, except the GGUF file itself; ModelError says what is not supported."""
    file = read_gguf(gguf)
    config = hugging_face_config(file)
    try:
        architecture_of(config)
    except ModelError as error:
        raise ModelError(f"{gguf}, described as a config.json: {error}") from None
    if (num_tokens := len(file.strings("tokenizer.ggml.tokens"))) > config["vocab_size"]:
        raise ModelError(
            f"{gguf}: the tokenizer has {num_tokens} tokens, but token_embd.weight has {config['vocab_size']} rows"
        )
    tokens = special_token_ids(file)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config | tokens)
    _write(folder / "generation_config.json", tokens)
    _write(folder / "tokenizer.json", tokenizer_json(file))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special_tokens(file),
        },
    )
    template = file.get("tokenizer.chat_template", str)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for_tools = file.get("tokenizer.chat_template.tool_use", str)
    if for_tools is not None:
        (folder / TEMPLATES_FOLDER).mkdir(exist_ok=True)
        (folder / TEMPLATES_FOLDER / "tool_use.jinja").write_text(for_tools, encoding="utf-8")


def hugging_face_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, without the ids of special tokens."""
    name = file.need("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(file, name)
    hidden_size = size_in(file, f"{name}.embedding_length")
    num_heads = size_in(file, f"{name}.attention.head_count")
    head_dim = size_in(file, f"{name}.attention.key_length", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"{file.path}: the heads' size must be even, got {head_dim}")
    for key in HEAD_SIZES:
        is_free = key == "rope.dimension_count" and name in PARTLY_ROTATED
        if (length := file.get(f"{name}.{key}", int)) not in (None, head_dim) and not is_free:
            raise ModelError(
                f"{file.path}: {name}.{key} must equal the heads' size, {head_dim}, got {length}"
            )
    window = file.get(f"{name}.attention.sliding_window", int)
    if window and name not in WINDOWED:
        raise ModelError(f"{file.path}: {name}.attention.sliding_window ({window}) is not supported")
    is_tied = "output.weight" not in file.tensors
    if is_tied and name in NEVER_TIED:
        raise ModelError(f"{file.path}: tensor output.weight is missing")
    architecture = ARCHITECTURES[name]
    if name == "llama" and (file.get("llama.expert_count", int) or 0) > 0:
        architecture = "MixtralForCausalLM"
    elif window and name in WITH_WINDOW:
        architecture = WITH_WINDOW[name]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].value,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": size_in(file, f"{name}.{INTERMEDIATE_SIZE.get(name, 'feed_forward_length')}"),
        "num_hidden_layers": size_in(file, f"{name}.block_count", most=len(file.tensors)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size_in(file, f"{name}.attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": size_in(file, f"{name}.context_length", most=2**30),
        "rms_norm_eps": positive_in(file, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, name, head_dim),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": is_tied,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if window:
        config["sliding_window"] = window
    config = completed(file, name, config)
    counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    _check_experts(file, next(filter(None, counts), 0))
    return config


def _check_experts(file: GgufFile, num_experts: int) -> None:
    """ModelError if tensors have other experts than the metadata says, or have them twice."""
    matches = [(tensor, match) for name, tensor in file.tensors.items() if (match := EXPERTS.search(name))]
    if len({match[1] is None for _, match in matches}) > 1:
        raise ModelError(f"{file.path}: some tensors have all experts of a layer, others only one")
    numbers = {str(number) for number in range(num_experts)}
    for tensor, match in matches:
        dims, part = (2, "vector") if tensor.name.endswith(".bias") else (3, "matrix")
        if match[1] is None:
            fits = len(tensor.shape) == dims and tensor.shape[0] == num_experts
        else:
            fits = len(tensor.shape) == 2 and match[1] in numbers
        if not fits:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has shape {list(tensor.shape)}, but the metadata implies "
                f"{num_experts} experts, a {part} each"
            )


def _refuse_unsupported(file: GgufFile, name: str) -> None:
    if (file.metadata.get("split.count") or 1) != 1:
        raise ModelError(
            f"{file.path} is one of several parts; join them first: llama-gguf-split --merge FIRST_PART WHOLE_FILE"
        )
    for key, harmless in VALUES_WITHOUT_EFFECT.items():
        value = file.metadata.get(f"{name}.{key}")
        if value is not None and value not in harmless and key not in KEYS_READ.get(name, ()):
            raise ModelError(f"{file.path}: {name}.{key} ({value!r:.80}) is not supported")


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _rope(file: GgufFile, name: str, head_dim: int) -> dict[str, object]:
    """`rope_parameters` of a config.json. As in llama.cpp, a factor without a type means linear scaling."""
    theta = positive_in(file, f"{name}.rope.freq_base", default=10_000.0)
    kind = file.get(f"{name}.rope.scaling.type", str) or "linear"
    older = positive_in(file, f"{name}.rope.scale_linear", default=1.0)
    factor = positive_in(file, f"{name}.rope.scaling.factor", default=older)
    by_tensors = ("longrope",) if name == "phi3" else ()
    is_scaled = kind != "none" and not (kind in ("linear", *by_tensors) and factor == 1.0)
    if "rope_freqs.weight" in file.tensors:
        if is_scaled:
            raise ModelError(
                f"{file.path}: rope_freqs.weight together with {name}.rope.scaling is not supported"
            )
        return _llama3_rope(file, theta, head_dim)
    if not is_scaled:
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: {name}.rope.scaling.type {kind!r} is not supported")
    scaled: dict[str, object] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    for beta in ("beta_fast", "beta_slow"):
        if (key := f"{name}.rope.scaling.yarn_{beta}") in file.metadata:
            scaled[beta] = positive_in(file, key)
    if original := file.get(f"{name}.rope.scaling.original_context_length", int):
        scaled["original_max_position_embeddings"] = original
    return scaled


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, object]:
    """Llama 3.1's scaling. The file contains only the divisors of all frequencies.

    The largest divisor is the scaling's factor. The other parameters are the same in all models of Meta; the
    code checks that the divisors match them.
    """
    divisors = floats_in(file, "rope_freqs.weight")
    if not all(1.0 <= divisor < math.inf for divisor in divisors):
        raise ModelError(f"{file.path}: the values of rope_freqs.weight must be at least 1")
    low, high, original, factor = 1.0, 4.0, 8192, max(divisors)
    expected = []
    for i in range(head_dim // 2):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1.0 / ((1.0 - blend) / factor + blend))
    is_same = len(divisors) == len(expected) and all(
        math.isclose(found, value, rel_tol=1e-3) for found, value in zip(divisors, expected, strict=True)
    )
    if not is_same:
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3.1's scaling, and only this scaling is supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=None), encoding="utf-8")
