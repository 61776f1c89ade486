"""Simulates how the autoscaler follows the load of a day, in virtual time: `python -m benchmarks.autoscaling`.

Takes a minute or two.

For comparison, the same day runs on three fleets of fixed size. Their sizes are the largest number of workers that the
autoscaler had, the largest number before the burst, and the mean. The result is the share of time in which targets were
missed, and the cost in worker hours.

With `--dry-run`, the benchmark takes seconds, and only prints what a dry run says about a fleet that has just enough
workers.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import BatonConfig
from cluster.controller.planner import RoleChange, ScaleDecision
from simulator.queueing_fleet import Moment, OfferedLoad, QueueingFleet, WorkerSpeed

HOUR_S = 3600.0
BURST_H = 20.0
TARGETS = {"target_ttft_p99_s": 2.0, "target_itl_p99_s": 0.05}


def requests_per_s(at: float) -> float:
    """The load: quiet at night, a busy morning, a busier afternoon, and a burst of ten minutes at 20:00."""
    hour = at / HOUR_S % 24.0
    morning = 14.0 * math.exp(-(((hour - 10.0) / 1.6) ** 2))
    afternoon = 20.0 * math.exp(-(((hour - 15.0) / 2.0) ** 2))
    burst = 18.0 if BURST_H <= hour < BURST_H + 1.0 / 6.0 else 0.0
    return 0.5 + morning + afternoon + burst


@dataclass(slots=True)
class Hour:
    """Sums over all checks that the autoscaler made in one hour."""

    num_checks: int = 0
    prefill: int = 0
    decode: int = 0
    paid: int = 0
    missed: int = 0
    changes: int = 0


@dataclass(frozen=True, slots=True)
class Day:
    hours: tuple[Hour, ...]
    changes: Counter[str]
    most: tuple[int, int]
    most_before_the_burst: tuple[int, int]
    sentences: tuple[str, ...]

    @property
    def worker_hours(self) -> float:
        return sum(hour.paid / hour.num_checks for hour in self.hours)

    @property
    def missed(self) -> float:
        """The share of the day's checks at which some target was missed."""
        return sum(hour.missed for hour in self.hours) / sum(hour.num_checks for hour in self.hours)


def run_day(prefill: int, decode: int, mode: str, num_hours: int, **autoscaling: object) -> Day:
    config = BatonConfig.from_mapping(
        {
            "cluster": {"prefill": prefill, "decode": decode},
            "autoscaling": {"mode": mode, "max_prefill": 12, "max_decode": 12, **TARGETS, **autoscaling},
        }
    )
    hours = [Hour() for _ in range(num_hours)]
    changes, sentences = Counter[str](), list[str]()
    most, most_before_the_burst = [prefill, decode], [prefill, decode]

    def note(moment: Moment) -> None:
        hour, seen = hours[int(moment.at / HOUR_S)], moment.report
        hour.num_checks += 1
        hour.prefill += moment.num_prefill
        hour.decode += moment.num_decode
        hour.paid += moment.num_paid
        for counts in (most, most_before_the_burst) if moment.at < BURST_H * HOUR_S else (most,):
            counts[:] = max(counts[0], moment.num_prefill), max(counts[1], moment.num_decode)
        is_missed = (
            seen.ttft_s[1] > TARGETS["target_ttft_p99_s"] or seen.itl_s[1] > TARGETS["target_itl_p99_s"]
        )
        hour.missed += is_missed
        if mode == "on" and moment.decision.change is not None:
            hour.changes += 1
            changes[_kind(moment.decision.change, moment.decision.sentence)] += 1
            sentences.append(f"{moment.at / HOUR_S:5.2f} h  {moment.decision.sentence}")

    load = OfferedLoad(requests_per_s, max_requests_per_s=40.0)
    QueueingFleet(config, WorkerSpeed(), seed=1).play(load, num_hours * HOUR_S, note)
    before = (most_before_the_burst[0], most_before_the_burst[1])
    return Day(tuple(hours), changes, (most[0], most[1]), before, tuple(sentences))


def _kind(change: ScaleDecision | RoleChange, sentence: str) -> str:
    if isinstance(change, RoleChange):
        return "role changed"
    return "grown" if " +" in sentence.split("(")[0] else "shrunk"


def table(day: Day) -> list[str]:
    """One line for each hour; a bar shows the workers, P for prefill and D for decode."""
    lines = ["hour  requests/s  prefill  decode  missed  changes"]
    for number, hour in enumerate(day.hours):
        prefill, decode = hour.prefill / hour.num_checks, hour.decode / hour.num_checks
        bar = "P" * round(prefill) + "D" * round(decode)
        rate = requests_per_s((number + 0.5) * HOUR_S)
        lines.append(
            f"{number:>4}  {rate:10.1f}  {prefill:7.1f}  {decode:6.1f}  {hour.missed / hour.num_checks:6.1%}"
            f"  {hour.changes:7}  {bar}"
        )
    return lines


def compare(num_hours: int) -> list[str]:
    """Compares the autoscaler with fleets of fixed size, and returns the whole report."""
    scaled = run_day(1, 1, "on", num_hours)
    lines = [*table(scaled), "", "fleet                worker hours  targets missed  changes"]
    mean = [
        sum(getattr(h, role) / h.num_checks for h in scaled.hours) / num_hours
        for role in ("prefill", "decode")
    ]
    fixed = {
        "as at most": scaled.most,
        "as before 20:00": scaled.most_before_the_burst,
        "as in the mean": (math.ceil(mean[0]), math.ceil(mean[1])),
    }
    lines.append(_line("autoscaled", scaled))
    for name, (prefill, decode) in fixed.items():
        day = run_day(prefill, decode, "dry_run", num_hours)
        lines.append(_line(f"{prefill}P + {decode}D, {name}", day))
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(scaled.changes.items()))
    lines += ["", f"{scaled.changes.total() / num_hours:.1f} changes an hour: {counts}", *scaled.sentences]
    return lines


def dry_run() -> tuple[str, ...]:
    """What a dry run of a quarter of an hour says. The load is nearly too much for the only decode worker."""
    scaling = {"mode": "dry_run", "min_prefill": 1, "max_prefill": 4, "max_decode": 4, **TARGETS}
    config = BatonConfig.from_mapping({"cluster": {"prefill": 2, "decode": 1}, "autoscaling": scaling})
    fleet = QueueingFleet(config, WorkerSpeed(), seed=7)
    fleet.play(OfferedLoad(lambda _: 4.2, max_requests_per_s=40.0), 900.0)
    return fleet.autoscaler.decisions


def _line(name: str, day: Day) -> str:
    return f"{name:<24} {day.worker_hours:8.0f}  {day.missed:14.1%}  {day.changes.total():7}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    print(*(dry_run() if options.dry_run else compare(options.hours)), sep="\n")


if __name__ == "__main__":
    main()
