"""What each switch of engine/kernels/switches.py saves: the same decode step with and without the switch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from benchmarks.gpu.build import NotingRecorder, engine_over
from benchmarks.gpu.measure import make_recorder, relative_error, seconds, synchronize
from benchmarks.gpu.plans import PlanMaker
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from engine.batch import StepLimits
from engine.gpu.graphs import Replay
from engine.kernels.switches import ALL_OFF, KernelSwitches, switched
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Comparison:
    """The model, the pool and the sizes of the comparison."""

    model: LoadedModel
    pool: KVPool
    """Its blocks are filled with keys and values."""
    context: int
    max_batch: int
    """How many requests decode in a step for a switch that has no effect on a single request."""
    rounds: int
    max_error: float
    """Largest allowed error of the logits, relative to the logits with all switches on."""


def switch_rows(setting: Setting, part: str, name: str, comparison: Comparison) -> Iterator[Row]:
    """Yields a row for each switch, in which only this switch is off, and a row in which all switches are off.

    For `timed_products`, the steps decode `max_batch` requests. All other steps decode one request.
    """
    for field in fields(KernelSwitches):
        off = KernelSwitches(**{field.name: False})
        batch = comparison.max_batch if field.name == "timed_products" else 1
        yield _compare(setting, part, f"{name}: batch {batch}, {off.off[0]}", comparison, batch, off)
    yield _compare(setting, part, f"{name}: batch 1, all switches off", comparison, 1, ALL_OFF)


def _compare(
    setting: Setting, part: str, title: str, comparison: Comparison, batch: int, off: KernelSwitches
) -> Row:
    """Compares a step with the switches of `off` and a step with all switches on.

    Both steps are recorded first, and then timed directly after each other, since the device's clock rate changes.
    """
    with (
        _recorded(setting, comparison, batch, KernelSwitches()) as (on_RV, replay_on),
        _recorded(setting, comparison, batch, off) as (off_RV, replay_off),
    ):
        on_s, off_s = (seconds(setting.device, each, comparison.rounds) for each in (replay_on, replay_off))
    error = relative_error(off_RV, on_RV)
    return Row(
        part,
        title,
        f"{off_s / on_s - 1:+.1%} time",
        f"{1e3 * off_s:.3f} ms, {1e3 * on_s:.3f} with all switches on; logits {error:.1e} off, at most "
        f"{comparison.max_error:g}",
        is_failed=not error <= comparison.max_error,
        figures={"on_s": on_s, "off_s": off_s, "relative_error": error, "off": list(off.off)},
    )


@contextmanager
def _recorded(
    setting: Setting, comparison: Comparison, batch: int, switches: KernelSwitches
) -> Iterator[tuple[torch.Tensor, Replay]]:
    """The logits of a step with these switches, and a function that computes the step again."""
    pool, model, context = comparison.pool, comparison.model, comparison.context
    recorder = NotingRecorder(make_recorder(setting.device))
    with switched(switches):
        engine = engine_over(setting, model, pool, StepLimits(batch, batch, context + 1), recorder, [batch])
        plans = PlanMaker(pool.num_blocks, pool.shape.block_size, model.vocab_size)
        engine.runner.execute(plans.step([context] * batch))
    synchronize(setting.device)
    assert engine.forward.logits_RV is not None
    assert recorder.last is not None, "the step was not replayed"
    replay = recorder.last

    def replay_switched() -> None:
        with switched(switches):
            replay()

    yield engine.forward.logits_RV.float().clone(), replay_switched
