"""Smoke tests of sampling: its kernels, and a step of greedy and random requests through the device sampler.

Shape suffixes: R rows, V vocabulary, F fields of a row's parameters, P processed rows, W words of a mask.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from baton.sampling import SamplingParams
from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.batch import RunnerRequest
from engine.gpu.device_sampler import DeviceSampler
from engine.kernels.logprobs import token_logprobs
from engine.kernels.process_logits import process_logits
from engine.kernels.sample import sample
from engine.kernels.sampling_parts import allocate_workspace
from engine.sampler import sample as sample_on_host
from tests.factories.stepping import make_request_data
from tests.kernels.references import process_logits_reference, sample_reference, token_logprobs_reference
from tests.kernels.test_process_logits import edit
from tests.kernels.test_sample import params

NUM_ROWS = 4
FILTERS: dict[str, dict[str, Any]] = {
    "row_stats": {"temperature": 0.0},
    "gumbel_draw": {},
    "filtered_draw": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
}
"""Sampling parameters of a case's rows, by the kernel that the case tests: the last one that has work for such rows."""


def makers(shapes: Shapes) -> list[Maker]:
    return [partial(make, shapes) for make in (_draws, _logprobs, _process)]


def _draws(shapes: Shapes) -> Iterator[SmokeCase]:
    for file, filters in FILTERS.items():
        yield _draw(shapes, file, filters)


def _draw(shapes: Shapes, file: str, filters: dict[str, Any]) -> SmokeCase:
    """A case with its reference on the host.

    Logarithms on a GPU may differ in the last bits from those on the host. The drawn tokens must still be equal.
    """
    logits_RV = 3 * shapes.randn(NUM_ROWS, shapes.vocab)
    params_RF = params(NUM_ROWS, **filters)
    on_device_RF = params_RF.to(shapes.device)
    workspace = allocate_workspace(NUM_ROWS, shapes.vocab, shapes.device)

    def draw() -> Outputs:
        tokens_R = torch.full((NUM_ROWS,), -1, dtype=torch.int32, device=shapes.device)
        flags_R = torch.full_like(tokens_R, -1)
        sample(logits_RV, None, on_device_RF, tokens_R, flags_R, workspace, is_greedy=file == "row_stats")
        return tokens_R, flags_R

    def reference() -> Outputs:
        tokens_R = sample_reference(logits_RV.cpu(), params_RF)
        return tokens_R, torch.zeros_like(tokens_R)

    return SmokeCase(f"{file}, {NUM_ROWS} rows", (file, "sampling_parts"), draw, reference, 0.0)


def _logprobs(shapes: Shapes) -> Iterator[SmokeCase]:
    logits_RV = 3 * shapes.randn(NUM_ROWS, shapes.vocab)
    rows_L, tokens_R = shapes.int32([0, 2]), shapes.int32([1, 5, 9, 11])
    yield SmokeCase(
        "token_logprobs",
        ("logprobs",),
        lambda: token_logprobs(logits_RV, rows_L, tokens_R),
        lambda: token_logprobs_reference(logits_RV, rows_L, tokens_R),
        1e-5,
    )


def _process(shapes: Shapes) -> Iterator[SmokeCase]:
    logits_RV = 3 * shapes.randn(NUM_ROWS, shapes.vocab)
    rows_P, mask_rows_P = shapes.int32([3, 0]), shapes.int32([-1, 0])
    masks_PW = torch.full((1, -(-shapes.vocab // 32)), 0x55555555, dtype=torch.int32, device=shapes.device)
    edits = [edit(0, 3, bias=1.5, repetition=1.3, off=0.2), edit(1, 4, is_forbidden=True)]
    edits_EF = torch.stack(edits).to(shapes.device)

    def processed() -> Outputs:
        processed_PV = torch.full((2, shapes.vocab), torch.nan, device=shapes.device)
        process_logits(logits_RV, rows_P, masks_PW, mask_rows_P, edits_EF, processed_PV)
        return (processed_PV.nan_to_num(nan=0.5, neginf=-1e4),)

    def reference() -> Outputs:
        expected_PV = process_logits_reference(logits_RV, rows_P, masks_PW, mask_rows_P, edits_EF)
        return (expected_PV.nan_to_num(neginf=-1e4),)

    yield SmokeCase("process_logits", ("process_logits",), processed, reference, 0.0)


def sampled_step(shapes: Shapes) -> tuple[list[int], list[int]]:
    """Tokens of one step with greedy and random rows: those of the device sampler, and those of the host."""
    requests = [
        _request(temperature=0.0),
        _request(temperature=1.0, seed=1),
        _request(temperature=0.8, top_p=0.9, seed=2, logprobs=2),
        _request(temperature=0.0, repetition_penalty=1.3),
    ]
    logits_RV = 3 * shapes.randn(len(requests), shapes.vocab)
    sampler = DeviceSampler(shapes.vocab, len(requests), shapes.device)
    found = [token.token_id for token in sampler(logits_RV, requests).wait()]
    assert sampler.sampled_R.tolist() == found, "what the next step would embed is not what was reported"
    return found, [token.token_id for token in sample_on_host(logits_RV.cpu(), requests)]


def _request(**sampling: Any) -> RunnerRequest:
    params = SamplingParams(max_tokens=1_000, **sampling)
    return RunnerRequest(make_request_data((1, 2, 2), (5, 6, 5), params))
