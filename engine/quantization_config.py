"""Quantization: how a checkpoint stores its matrices, by its `quantization_config`; reads no weights.

Imports no torch, since the command that starts a fleet also reads config.json files. An unknown key is
refused, since it may change what the numbers mean.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from engine.config_values import object_of
from engine.quantization_scheme import MXFP4_BLOCK, Layout, Scheme

KEY = "quantization_config"
OLD_KEY = "compression_config"
"""The key in the first checkpoints of compressed-tensors."""
QUANTIZATION_KEYS = (KEY, OLD_KEY)
"""The keys under which a config.json may declare a quantization; the first that is set counts."""
FIRST_WITH_FP8 = (8, 9)
"""Compute capability of Ada, the first GPUs with 8-bit floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The schemes of a checkpoint."""

    method: str
    """The value of `quant_method`."""
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Pairs: the names of targets, and the scheme of these targets. The first pair that matches counts."""
    ignored: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module's matrix (`model.layers.0.mlp.up_proj`); None if it is not quantized."""
        if any(_is_named(module, each) or _is_of_class(module, each) for each in self.ignored):
            return None
        for matches in (_is_named, _is_of_class):  # compressed-tensors prefers names to classes
            for targets, scheme in self.schemes:
                if any(matches(module, target) for target in targets):
                    return scheme
        return None

    def num_parameters(self, name: str, num_values: int) -> int:
        """How many model parameters a tensor of `num_values` values stores; 0 for scales and zero points."""
        module, _, kind = name.rpartition(".")
        if self.method == "mxfp4" and kind.endswith(("_blocks", "_scales")):
            return 2 * num_values if kind.endswith("_blocks") else 0
        if kind in ("qweight", "weight_packed"):
            scheme = self.scheme_of(module)
            return num_values * (1 if scheme is None else 32 // scheme.bits)
        return num_values if kind.endswith(("weight", "bias", "sinks")) else 0


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config.json declares, or None; ModelError names an unsupported key."""
    key, given = _declared(config)
    if config.get(key) is None:
        return None
    if key == OLD_KEY:
        return _compressed_tensors(given, OLD_KEY)
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ModelError(
            f"{KEY}.quant_method {method!r:.80} is not supported; supported are {', '.join(_READERS)}; "
            "use other weights of the model"
        )
    return _READERS[method](given)


def check_kv_cache_scheme(config: Mapping[str, Any]) -> None:
    """ModelError if config.json quantizes keys and values to anything but 8-bit floats with one scale for each
    tensor."""
    key, given = _declared(config)
    scheme, key_path = given.get("kv_cache_scheme"), f"{key}.kv_cache_scheme"
    if scheme is None or scheme == _STATIC:
        return
    try:
        if not isinstance(scheme, Mapping):
            raise ModelError(f"{key_path} must be an object or {_STATIC!r}, got {scheme!r:.80}")
        _refuse_others(scheme, key_path, _KV_CACHE)
    except ModelError as error:
        raise ModelError(f"{error}; set engine.kv_cache_dtype to 'auto', which needs no scales") from None


def _declared(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key that declares a quantization, and its object, which is empty if the key is missing."""
    key = KEY if config.get(KEY) is not None else OLD_KEY
    return key, object_of(config, key)


def _compressed_tensors(config: Mapping[str, Any], key: str = KEY) -> Quantization:
    _refuse_others(config, key, _COMPRESSED_TENSORS)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not (groups or config.get("kv_cache_scheme")):
        raise ModelError(f"{key}.config_groups must be an object with groups, got {groups!r:.80}")
    schemes: dict[str, Scheme] = {}
    for name, group in groups.items():
        key_path = f"{key}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ModelError(f"{key_path} must be an object, got {group!r:.80}")
        _refuse_others(group, key_path, _GROUP)
        stored_as = group.get("format") or config.get("format")
        scheme = _scheme_of(group.get("weights"), stored_as, key_path)
        schemes |= dict.fromkeys(_names(group, "targets", key_path), scheme)
    # compressed-tensors prefers names to regular expressions, and takes each kind in alphabetical order.
    in_order = sorted(schemes.items(), key=lambda item: ("re:" in item[0], item[0]))
    return Quantization(
        method="compressed-tensors",
        schemes=tuple(((target,), scheme) for target, scheme in in_order),
        ignored=_names(config, "ignore", key),
    )


def _scheme_of(weights: object, stored_as: object, key_path: str) -> Scheme:
    """The scheme of one group in a configuration of compressed-tensors."""
    if not isinstance(weights, Mapping):
        raise ModelError(f"{key_path}.weights must be an object, got {weights!r:.80}")
    _refuse_others(weights, f"{key_path}.weights", _WEIGHTS)
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    if kind not in _FORMATS.get(stored_as if isinstance(stored_as, str) else "", ()):
        raise ModelError(
            f"{key_path}: {kind[1]} bits of type {kind[0]!r} in format {stored_as!r} are not supported; "
            f"supported formats are {', '.join(_FORMATS)}"
        )
    is_packed, is_float = stored_as == "pack-quantized", kind[0] == "float"
    outputs, inputs = _sharing(weights, f"{key_path}.weights")
    has_zero_points = not weights.get("symmetric", True)
    if has_zero_points and (is_float or outputs != 1):
        raise ModelError(
            f"{key_path}.weights.symmetric false is only supported for integers by channel or group"
        )
    return Scheme(
        layout=Layout.PACKED if is_packed else Layout.NUMBERS,
        bits=4 if kind[1] == 4 else 8,
        is_float=is_float,
        outputs_per_scale=outputs,
        inputs_per_scale=inputs,
        has_zero_points=has_zero_points,
        has_own_order=weights.get("actorder") in (True, "group", "dynamic"),
    )


def _sharing(weights: Mapping[str, Any], key_path: str) -> tuple[int | None, int | None]:
    """How many outputs, and how many inputs, share a scale."""
    size, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, _count(size, f"{key_path}.group_size")
    if strategy == "block":
        return _block(block, f"{key_path}.block_structure")
    raise ModelError(
        f"{key_path}.strategy {strategy!r} is not supported; supported are tensor, channel, group, block"
    )


def _fp8(config: Mapping[str, Any]) -> Quantization:
    _refuse_others(config, KEY, _FP8)
    block = config.get("weight_block_size")
    outputs, inputs = (None, None) if block is None else _block(block, f"{KEY}.weight_block_size")
    scheme = Scheme(
        layout=Layout.NUMBERS, bits=8, is_float=True, outputs_per_scale=outputs, inputs_per_scale=inputs
    )
    return _of_all("fp8", scheme)


def _gptq(config: Mapping[str, Any]) -> Quantization:
    _refuse_others(config, KEY, _GPTQ)
    if config.get("bits") is None:
        raise ModelError(f"{KEY}.bits is missing; supported: 4, 8")
    stored_as = config.get("checkpoint_format") or config.get("format") or "gptq"
    size = config.get("group_size", 128)
    scheme = Scheme(
        layout=Layout.GPTQ_V2 if stored_as == "gptq_v2" else Layout.GPTQ,
        bits=4 if config["bits"] == 4 else 8,
        inputs_per_scale=None if size == -1 else _count(size, f"{KEY}.group_size"),
        has_zero_points=True,
        has_own_order=bool(config.get("desc_act", False)),
    )
    return _of_all("gptq", scheme)


def _awq(config: Mapping[str, Any]) -> Quantization:
    _refuse_others(config, KEY, _AWQ)
    size = config.get("group_size", config.get("q_group_size", 128))
    scheme = Scheme(
        layout=Layout.AWQ,
        bits=4,
        inputs_per_scale=None if size == -1 else _count(size, f"{KEY}.group_size"),
        has_zero_points=True,
    )
    return _of_all("awq", scheme)


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    """A matrix is quantized if the checkpoint has its `blocks`; `modules_to_not_convert` is ignored."""
    _refuse_others(config, KEY, _MXFP4)
    return _of_all("mxfp4", Scheme(layout=Layout.MXFP4, bits=4, inputs_per_scale=MXFP4_BLOCK))


def _of_all(method: str, scheme: Scheme) -> Quantization:
    """One scheme for all matrices.

    Such checkpoints name no targets: a matrix' tensors show whether it is quantized.
    """
    return Quantization(method=method, schemes=((("re:.*",), scheme),))


_READERS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}

ANY = None
"""Allows every value: the key is read above, or has no effect on the numbers."""
Values = Mapping[str, tuple[object, ...] | None]


def _any(names: str) -> Values:
    return dict.fromkeys(names.split(), ANY)


_FORMATS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8), ("int", 4)),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
}
"""`format` -> its supported types and bits."""

_COMPRESSED_TENSORS: Values = {
    **_any("quant_method config_groups format ignore kv_cache_scheme quantization_status version"),
    **_any("global_compression_ratio run_compressed dequantize use_optimized_inference"),
    "sparsity_config": ({}, {"format": "dense"}),
    "transform_config": ({},),
}
_GROUP: Values = {**_any("targets weights input_activations format"), "output_activations": ()}
_WEIGHTS: Values = {
    **_any("num_bits type symmetric strategy group_size block_structure"),
    **_any("observer observer_kwargs scale_dtype zp_dtype"),
    "dynamic": (False,),
    "actorder": (True, False, "group", "dynamic", "weight", "static"),
}
_KV_CACHE: Values = {
    **_any("observer observer_kwargs scale_dtype zp_dtype group_size block_structure actorder"),
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor",),
    "symmetric": (True,),
    "dynamic": (False,),
}
_STATIC = "static"
"""Checkpoints of AMD and Tencent give this name to the scheme of `_KV_CACHE`, with a scale for each layer."""
_FP8: Values = {
    **_any("quant_method activation_scheme weight_block_size modules_to_not_convert ignored_layers"),
    **_any("kv_cache_scheme dequantize"),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
}
_CALIBRATION: Values = _any(
    "dataset tokenizer damp_percent damp_auto_increment true_sequential static_groups mse meta quantizer "
    "act_group_aware batch_size pad_token_id model_seqlen version model_name_or_path lm_head sym "
    "model_file_base_name block_name_to_quantize cache_block_outputs module_name_preceding_first_block "
    "modules_in_block_to_quantize max_input_length backend use_exllama disable_exllama exllama_config use_cuda_fp16"
)
"""Keys that describe how a checkpoint was made, and which kernels other programs should use."""
_GPTQ: Values = {
    **_CALIBRATION,
    **_any("quant_method group_size desc_act"),
    "bits": (4, 8),
    "method": ("gptq",),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "dynamic": ({},),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
}
# GPTQModel writes zero points even if `zero_point` is false: then all of them are 8.
_AWQ: Values = {
    **_CALIBRATION,
    **_any("quant_method group_size q_group_size modules_to_not_convert"),
    **_any("do_fuse modules_to_fuse fuse_max_seq_len"),
    "bits": (4,),
    "w_bit": (4,),
    "method": ("awq",),
    "zero_point": (True, False),
    "version": ("gemm", "GEMM"),
    "format": ("gemm", "GEMM"),
    "checkpoint_format": ("gemm", "GEMM"),
    "dynamic": ({},),
    "pack_dtype": ("int32",),
    "backend": ("auto", "autoawq"),
    "desc_act": (False,),
}
_MXFP4: Values = _any("quant_method modules_to_not_convert dequantize")
"""These tables have the keys of each method, and the supported values of each key; null is always supported."""


def _refuse_others(config: Mapping[str, Any], key_path: str, supported: Values) -> None:
    for key, value in config.items():
        if key not in supported:
            raise ModelError(f"{key_path}.{key} is not supported; use other weights of the model")
        values = supported[key]
        if values is ANY or value is None or value in values:
            continue
        if isinstance(value, Mapping) and {"format": value.get("format")} in values:
            continue  # if the format has no effect, its other keys have none
        hint = f"; supported: {', '.join(map(repr, values))}" if values else ""
        raise ModelError(f"{key_path}.{key} {value!r:.80} is not supported{hint}")


def _names(config: Mapping[str, Any], key: str, key_path: str) -> tuple[str, ...]:
    names = config.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{key_path}.{key} must be a list of names, got {names!r:.80}")
    for name in names:
        if not name.startswith("re:"):
            continue
        try:
            re.compile(name.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(
                f"{key_path}.{key}: {name!r} is not a valid regular expression: {error}"
            ) from None
    return tuple(names)


def _count(value: object, key_path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key_path} must be a positive integer, got {value!r:.80}")
    return value


def _block(value: object, key_path: str) -> tuple[int, int]:
    if isinstance(value, str):  # "128x128", of older files
        value = [int(size) if re.fullmatch("[0-9]{1,9}", size) else size for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise ModelError(f"{key_path} must be two sizes, got {value!r:.80}")
    return _count(value[0], key_path), _count(value[1], key_path)


def _is_named(module: str, pattern: str) -> bool:
    """Whether the pattern is the module's name, or `re:` and a regular expression that matches the name's beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern


def _is_of_class(module: str, pattern: str) -> bool:
    return pattern == ("Embedding" if module.endswith("embed_tokens") else "Linear")
