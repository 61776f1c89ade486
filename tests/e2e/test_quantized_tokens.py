"""Models in fewer bits, and KV of 16 bits beside float32, answer disaggregated as on D alone; also with ranks."""

import asyncio
from pathlib import Path

import pytest

from engine.loading.pretrained import resolve
from engine.native.library import native_library
from tests.e2e.test_tensor_parallel import check_same_answers, make_config
from tests.factories.gguf_files import make_gguf
from tests.factories.local_cluster import local_cluster
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import KINDS, make_quantized

pytestmark = pytest.mark.slow


def check(path: Path, quantization: str, num_ranks: int, kept: str = "gguf", **engine: object) -> None:
    """`kept`: the quantization that `auto` keeps if Baton's kernels support it."""
    model: dict[str, object] = {"path": str(path), "quantization": quantization}
    config = make_config(model, {"tensor_parallel": num_ranks, **engine})

    async def run() -> None:
        async with local_cluster(config, path) as cluster:
            await check_same_answers(cluster)
            description = await cluster.client.describe()
            named = {"none": "", "auto": kept if native_library() is not None else ""}
            found = {worker["quantization"] for worker in description["workers"]}
            assert found == {named.get(quantization, quantization)}

    asyncio.run(run())


MORE = [pytest.param("fp8", num_ranks, marks=pytest.mark.by_hand) for num_ranks in (1, 2)]


@pytest.mark.parametrize(("quantization", "num_ranks"), [("int8", 1), ("int4", 2), *MORE])
def test_a_checkpoint_that_is_quantized_while_loading(
    folder: Path, quantization: str, num_ranks: int
) -> None:
    check(folder, quantization, num_ranks)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.by_hand), 2])
def test_a_gguf_file_as_it_is(tmp_path: Path, num_ranks: int) -> None:
    """The file has several kinds of blocks, and is resolved like `--model FILE.gguf`."""
    gguf = make_gguf(
        tmp_path / "tiny.gguf",
        make_model_dir(tmp_path / "source", attention_bias=True),
        lambda name: "Q8_0" if "attn_v" in name or "token_embd" in name else "Q4_1",
    )
    check(resolve(str(gguf), tmp_path / "cache"), "auto", num_ranks)


@pytest.mark.by_hand  # unit tests compare the tokens; a GGUF file takes the same way through workers
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_published_quantized_checkpoint(tmp_path: Path, num_ranks: int) -> None:
    """Both workers keep the checkpoint's bits."""
    source = make_model_dir(tmp_path / "source", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    quantized, _ = make_quantized(tmp_path, source, KINDS["awq"])
    check(quantized, "auto", num_ranks, kept="awq")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.by_hand)])
def test_kv_of_16_bits_beside_float32(folder: Path, num_ranks: int) -> None:
    check(folder, "none", num_ranks, kv_cache_dtype="bfloat16")
