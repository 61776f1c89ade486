import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config import BatonConfig
from baton.errors import ModelError
from engine.loading import dtype
from engine.loading.dtype import choose_dtype, dtype_of, with_chosen_dtype


def config(**sections: Any) -> BatonConfig:
    return BatonConfig.from_mapping(sections)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"avx512f", "avx512_bf16"}, "bfloat16 (auto: this CPU has AVX512-BF16)"),
        ({"amx_tile", "amx_bf16", "avx512_bf16"}, "bfloat16 (auto: this CPU has AMX)"),
        (
            {"avx512f", "avx512_vnni"},
            "float32, KV in bfloat16 (auto: this CPU has neither AMX nor AVX512-BF16)",
        ),
        (set(), "float32, KV in bfloat16 (auto: this CPU has neither AMX nor AVX512-BF16)"),
    ],
)
def test_a_cpu_computes_with_16_bits_if_it_has_instructions_for_them(
    flags: set[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(dtype, "may_have_kernels", lambda _: True)
    assert str(choose_dtype(config(), tmp_path)) == chosen


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ({"dtype": "bfloat16"}, "bfloat16 (auto: the checkpoint's own)"),
        ({"torch_dtype": "float16"}, "float16 (auto: the checkpoint's own)"),
        ({"torch_dtype": "float32"}, "bfloat16 (auto: the checkpoint's is float32)"),
        ({}, "bfloat16 (auto: the checkpoint names none)"),
    ],
)
def test_a_gpu_computes_in_the_checkpoints_own_16_bits(
    values: dict[str, str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset[str]())
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert str(choose_dtype(config(engine={"device": "cuda"}), tmp_path)) == chosen


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        choose_dtype(config(engine={"device": "cuda"}), tmp_path)


def test_a_configured_data_type_stays_and_nothing_else_changes(tmp_path: Path) -> None:
    asked = config(model={"dtype": "float16", "path": "/model"}, engine={"num_threads": 3})
    assert str(choose_dtype(asked, tmp_path)) == "float16"
    assert with_chosen_dtype(asked, tmp_path) == asked


def test_the_chosen_data_type_is_set_so_that_it_reaches_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get the keys that are set."""
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    chosen = with_chosen_dtype(config(engine={"num_threads": 3}), tmp_path)
    assert chosen.model_dump(exclude_unset=True) == {
        "model": {"dtype": "bfloat16"},
        "engine": {"num_threads": 3},
    }


def test_kv_has_16_bits_beside_float32_unless_the_configuration_names_a_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset[str]())
    monkeypatch.setattr(dtype, "may_have_kernels", lambda _: True)
    types = [
        dtype_of(with_chosen_dtype(asked, tmp_path))
        for asked in (
            config(engine={"num_threads": 3}),
            config(engine={"kv_cache_dtype": "fp8"}),
            config(model={"dtype": "float32"}),
            config(model={"dtype": "float32"}, engine={"kv_cache_dtype": "bfloat16"}),
        )
    ]
    assert types == [
        ("float32", "bfloat16", ""),
        ("float32", "fp8", ""),
        ("float32", "auto", ""),
        ("float32", "bfloat16", ""),
    ]


def test_kv_is_float32_too_where_torch_would_have_to_widen_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset[str]())
    monkeypatch.setattr(dtype, "may_have_kernels", lambda _: False)
    assert choose_dtype(config(), tmp_path)[:2] == ("float32", "auto")


@pytest.mark.slow
def test_choosing_imports_no_torch() -> None:
    check = "import sys, engine.loading.dtype; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
