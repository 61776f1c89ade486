"""Rows of the embedding table by token id; some ids may be known only to the device.

The vocabulary may be divided among ranks: rows of other ranks' tokens are zeros.

Shape suffixes: T tokens, R requests of the previous step, V tokens of this rank, E hidden size.
"""

import torch
import triton
import triton.language as tl

BLOCK_E = 2048
"""Two 16-byte loads of 16-bit numbers in each of 128 threads."""


def embed(
    ids_T: torch.Tensor,
    sources_T: torch.Tensor,
    sampled_R: torch.Tensor,
    weight_VE: torch.Tensor,
    first_token: int = 0,
) -> torch.Tensor:
    """T x E: the row of ids_T[t], or of sampled_R[sources_T[t]] if that source is not negative.

    So a step can be launched before the host knows the previous step's tokens. All indices are int32. `weight_VE` holds
    this rank's tokens, from `first_token` on. All other tokens give zeros, so the sum over ranks is the embedding.
    """
    assert ids_T.dtype is sources_T.dtype is sampled_R.dtype is torch.int32
    assert ids_T.shape == sources_T.shape
    assert ids_T.is_contiguous()
    assert sources_T.is_contiguous()
    assert sampled_R.is_contiguous()
    assert weight_VE.is_contiguous()
    num_tokens, (vocab_size, width) = len(ids_T), weight_VE.shape
    x_TE = torch.empty((num_tokens, width), dtype=weight_VE.dtype, device=weight_VE.device)
    if num_tokens > 0:
        _embed_kernel[(num_tokens, triton.cdiv(width, BLOCK_E))](
            ids_T,
            sources_T,
            sampled_R,
            weight_VE,
            x_TE,
            first_token,
            vocab_size,
            width,
            BLOCK_E=min(BLOCK_E, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return x_TE


@triton.jit
def _embed_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    sources_ptr,
    sampled_ptr,
    weight_ptr,
    x_ptr,
    first_token,
    vocab_size,
    width,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    token_id = tl.load(ids_ptr + token)
    source = tl.load(sources_ptr + token)
    if source >= 0:
        token_id = tl.load(sampled_ptr + source)
    row = token_id.to(tl.int64) - first_token
    x = tl.zeros([BLOCK_E], x_ptr.dtype.element_ty)
    if (row >= 0) & (row < vocab_size):
        x = tl.load(weight_ptr + row * width + columns, columns < width, other=0.0)
    tl.store(x_ptr + token * width + columns, x, columns < width)
