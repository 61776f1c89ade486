"""Cases of the attention kernel for a sweep: decodes and chunks of the 8B models."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sweep_case import Candidate, Launch, SweepCase, copies_beyond_cache, neighbours
from engine.kernels.attention_plan import plan_attention
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning, decode_tuning, prefill_tuning
from engine.kernels.merge_partials import merge_partials
from engine.kernels.paged_attention import LayerKV, Merging, Partials, Softmax, paged_attention
from engine.kernels.switches import kernel_switches

ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "block_n": (32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 7),
    "programs_per_multiprocessor": (1, 2, 3, 4),
}
CUDNN = "cuDNN's"
"""Name of torch's scaled_dot_product_attention, over contiguous keys and values without a cache."""
LLAMA_8B = AttentionShape(32, 8, 128, 64, 2, 2)
TINY = AttentionShape(2, 1, 16, 32, 4, 4)


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of a launch. Each has `num_queries` tokens at the end of `context`."""

    num_requests: int
    num_queries: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.num_queries == 1 else f"chunk of {self.num_queries}"
        return f"attention: {kind}, {self.num_requests} x {self.context}"

    @property
    def is_first_chunk(self) -> bool:
        """Whether the step is one whole prompt."""
        return self.num_requests == 1 < self.num_queries == self.context


STEPS = (
    *(Step(batch, 1, context) for context in (1024, 8192) for batch in (1, 16, 64)),
    Step(256, 1, 1024),
    *(Step(1, chunk, context) for chunk, context in ((512, 512), (2048, 2048), (2048, 8192), (8192, 8192))),
)


def cases(setting: Setting) -> Iterator[SweepCase]:
    shape = TINY if setting.is_dry else LLAMA_8B
    for step in (Step(2, 1, 40), Step(1, 4, 6), Step(1, 6, 6)) if setting.is_dry else STEPS:
        num_bytes = 2 * step.num_requests * step.context * shape.num_kv_heads * shape.head_dim
        num_bytes *= shape.kv_dtype_bytes
        copies = copies_beyond_cache(num_bytes) if not setting.is_dry else 2
        make = partial(_candidates, setting, shape, step, copies)
        yield SweepCase(step.name, copies, num_bytes, 1e-2, make, CUDNN if step.is_first_chunk else None)


def _candidates(setting: Setting, shape: AttentionShape, step: Step, num_copies: int) -> dict[str, Candidate]:
    chosen = decode_tuning(shape) if step.num_queries == 1 else prefill_tuning(shape)
    inputs = _Inputs(setting, shape, step, num_copies)
    alternatives: dict[str, tuple[int, ...]] = {"num_stages": (2,)} if setting.is_dry else ALTERNATIVES
    # A load of the copy engine must stay within a block.
    candidates: dict[str, Candidate] = {
        name: partial(inputs.launch, tuning)
        for name, tuning in neighbours(chosen, alternatives)
        if not (shape.uses_tma and tuning.block_n > shape.block_size)
    }
    return {**candidates, CUDNN: inputs.launch_cudnn} if step.is_first_chunk else candidates


class _Inputs:
    """The inputs of one step, with several copies of the pool."""

    def __init__(self, setting: Setting, shape: AttentionShape, step: Step, num_copies: int) -> None:
        self._setting, self._shape, self._step = setting, shape, step
        device, dtype = setting.device, torch.float32 if setting.is_dry else torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        num_blocks_each = -(-step.context // shape.block_size)
        num_blocks = step.num_requests * num_blocks_each + 1
        pool = (num_blocks, 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        blocks_NLKHTD = torch.randn(*pool, dtype=dtype, device=device, generator=generator)
        pools = [blocks_NLKHTD, *(blocks_NLKHTD.clone() for _ in range(num_copies - 1))]
        self._kvs = [LayerKV(each[:, 0], shape) for each in pools]
        queries = (step.num_requests * step.num_queries, shape.num_query_heads, shape.head_dim)
        self._q_TQD = torch.randn(*queries, dtype=dtype, device=device, generator=generator)
        order = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
        self._block_ids_BM = order.view(step.num_requests, num_blocks_each).to(torch.int32)

    def launch(self, tuning: AttentionTuning, copy: int) -> Launch:
        """Launches attention and, if contexts are split, the merge, as a step does."""
        step, shape, device = self._step, self._shape, self._setting.device
        requests_B = np.arange(step.num_requests)
        grid = tuning.grid(shape, self._setting.num_multiprocessors)
        plan = plan_attention(
            requests_B,
            requests_B * step.num_queries,
            np.full(step.num_requests, step.num_queries),
            np.full(step.num_requests, step.context),
            grid,
        )
        items_IF, merges_RF = (torch.from_numpy(a).to(device) for a in (plan.items_IF, plan.merges_RF))
        counts = torch.tensor([len(items_IF), len(merges_RF)], dtype=torch.int32, device=device)
        partials = Partials.empty(plan.num_partial_rows, shape, device)
        out_TQD = torch.full_like(self._q_TQD, torch.nan)
        kv, q_TQD, block_ids_BM = self._kvs[copy], self._q_TQD, self._block_ids_BM
        softmax = Softmax(shape.head_dim**-0.5)
        num_arrived_RH = torch.zeros((len(merges_RF), shape.num_kv_heads), dtype=torch.int32, device=device)
        merges = kernel_switches().fused_merge and step.num_queries == 1

        def launch() -> torch.Tensor:
            paged_attention(
                q_TQD,
                kv,
                block_ids_BM,
                items_IF,
                counts[:1],
                partials,
                out_TQD,
                softmax,
                tuning,
                grid.num_programs,
                Merging(merges_RF, num_arrived_RH) if merges else None,
            )
            if len(merges_RF) and not merges:
                out_PQD, weight_PQ = partials.out_PQD, partials.weight_PQ
                merge_partials(out_PQD, weight_PQ, merges_RF, counts[1:], out_TQD, grid.num_programs)
            return out_TQD

        return launch

    def launch_cudnn(self, copy: int) -> Launch:
        """Computes a first chunk with cuDNN. Raises RuntimeError if cuDNN does not support these inputs."""
        q_1QTD = self._q_TQD.transpose(0, 1)[None]
        blocks_NKHSD = self._kvs[copy].kv_NKHSD[self._block_ids_BM[0]]
        kv_KHTD = blocks_NKHSD.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self._step.context]
        keys_1HTD, values_1HTD = kv_KHTD.contiguous()[:, None]

        def launch() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out_1QTD = F.scaled_dot_product_attention(
                    q_1QTD, keys_1HTD, values_1HTD, is_causal=True, enable_gqa=True
                )
            return out_1QTD[0].transpose(0, 1)

        return launch
