"""The parts of a decoder layer by our own CPU kernels against torch's, in every dtype and for odd sizes."""

import pytest
import torch

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.layers.backend import InputTokens
from engine.layers.fp8 import FP8, saturate
from engine.layers.native_backend import NativeBackend
from engine.layers.torch_backend import TorchBackend
from engine.layers.workspace import Workspace
from engine.native.library import native_library
from tests.factories.attention_steps import Heads, make_layout

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZES = [(1, 576), (3, 1), (5, 17), (70, 100), (33, 1536)]

needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.fixture
def backend() -> NativeBackend:
    library = native_library()
    assert library is not None
    return NativeBackend(library)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_norms(backend: NativeBackend, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, branch = (torch.randn(num_tokens, width).to(dtype) for _ in range(2))
    weight = torch.rand(width).to(dtype)
    assert_close(backend.rms_norm(x, weight, 1e-5), TorchBackend().rms_norm(x, weight, 1e-5))
    ours, theirs = x.clone(), x.clone()
    assert_close(
        backend.add_rms_norm(branch, ours, weight, 1e-5),
        TorchBackend().add_rms_norm(branch, theirs, weight, 1e-5),
    )
    assert torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_norms_that_are_added(
    backend: NativeBackend,
    num_tokens: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
) -> None:
    """Weights may be in float32, while activations have 16 bits."""
    x, residual = (torch.randn(num_tokens, width).to(dtype) for _ in range(2))
    weight = torch.rand(width).add(1.0).to(weight_dtype or dtype)
    ours, theirs = residual.clone(), residual.clone()
    backend.add_normed(x, ours, weight, 1e-5)
    TorchBackend().add_normed(x, theirs, weight, 1e-5)
    assert_close(ours, theirs)
    assert_close(backend.rms_norm(x, weight, 1e-5), TorchBackend().rms_norm(x, weight, 1e-5))


class Same:
    """A projection that returns its input."""

    def __call__(self, x_TI: object) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor)
        return x_TI


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
@pytest.mark.parametrize("gate_by", [*Gate, ClampedSwiglu(alpha=1.702, limit=7.0)], ids=str)
def test_gates(
    backend: NativeBackend, num_tokens: int, width: int, dtype: torch.dtype, gate_by: Activation
) -> None:
    gate_up = (20 * torch.randn(num_tokens, 2 * width)).to(dtype)
    gate_up[0, 0] = -200.0  # whose exponential overflows
    gate, up = gate_up.double().chunk(2, -1)
    silu, gelu = torch.nn.functional.silu(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    expected = (silu if gate_by is Gate.SILU else gelu) * up
    if isinstance(gate_by, ClampedSwiglu):
        gate = gate.clamp(max=7.0)
        expected = (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(
        backend.gated(Same(), gate_up, gate_by).double(),
        expected,
        rtol=8e-3 if dtype != torch.float32 else 3e-6,
        atol=1e-5,
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_of_a_rank(backend: NativeBackend, dtype: torch.dtype) -> None:
    """Tokens of other ranks are zeros."""
    weight, tokens = torch.randn(10, 37).to(dtype), InputTokens(torch.tensor([7, 16, 17, 6, 9, 0, 40]))
    ours = backend.embed(tokens, weight, 7)
    assert torch.equal(ours, TorchBackend().embed(tokens, weight, 7))
    assert ours[1].any()
    assert not ours[2].any()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_16_bits_is_read_and_written_as_it_is(
    backend: NativeBackend, dtype: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(64, -1).clone()
    residual, zeros = every.clone(), torch.zeros_like(every)
    backend.add_rms_norm(zeros, residual, torch.ones(every.shape[1]).to(dtype), 1e-5)
    torch.testing.assert_close(residual, every, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_rounded_as_torch_rounds(backend: NativeBackend, dtype: torch.dtype) -> None:
    """Sums also round to subnormal numbers, to infinity, and from halfway between two numbers."""
    exponents = torch.arange(-26, 17, dtype=torch.float32).unsqueeze(1)
    x = ((1 + torch.arange(4096) / 2048) * 2**exponents).to(dtype)
    branch = (x.float() * torch.linspace(-1e-3, 2, x.shape[1])).to(dtype)
    residual = x.clone()
    backend.add_rms_norm(branch, residual, torch.ones(x.shape[1]).to(dtype), 1e-5)
    torch.testing.assert_close(residual, x + branch, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_8_bit_floats_are_rounded_as_torch_rounds() -> None:
    """Values are stored as they come, so the pool then holds each of them, rounded."""
    layout = make_layout([(40, 40)], Heads(1, 1, 256), torch.float32, pool_dtype=FP8)
    values = torch.cat([torch.linspace(-500, 500, 5120), torch.linspace(-0.05, 0.05, 5120)])
    values[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    layout.qkv_TPD[:, 2] = values.view(40, 256)
    _, pool = layout.native_out(0)
    rows = pool.slot_rows(torch.from_numpy(layout.batch.blocks[0].slots_T)).view(40, 2)[:, 1]
    stored = pool.layers[0].slot_rows_RD.float()[rows].flatten()
    torch.testing.assert_close(stored, saturate(values).float(), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_other_rows(backend: NativeBackend, dtype: torch.dtype) -> None:
    x, weight = torch.randn(50, 96).to(dtype), torch.rand(96).to(dtype)
    normed = backend.rms_norm(x, weight, 1e-5).clone()
    gated = backend.gated(Same(), x).clone()
    for row in (0, 31, 49):
        assert torch.equal(backend.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(backend.gated(Same(), x[row : row + 1])[0], gated[row])


def test_the_workspace_hands_out_the_same_memory_again() -> None:
    workspace = Workspace(CPU)
    first = workspace.borrow(torch.float32, 4, 8)
    assert first.shape == (4, 8)
    assert workspace.borrow(torch.bfloat16, 2, 3).data_ptr() == first.data_ptr()
    assert workspace.borrow(torch.float32, 4, 8).data_ptr() == first.data_ptr()
    larger = workspace.borrow(torch.float32, 100, 8)
    assert larger.shape == (100, 8)
    assert larger.dtype is torch.float32
