"""What `baton top` draws: rates from two looks, bars, and screens of any size."""

from typing import Any

import pytest
from rich.console import Console

from cli.main import USAGE, main
from cli.views import rates, words
from cli.views.top import TopView, bar, fit
from tests.factories.descriptions import description, gateway, loaded_from, missing, node, worker

DECISIONS = [f"12:0{minute} kept 1 prefill and 3 decode workers." for minute in range(9)]


def fleet(*, num_mib: float = 10.0, done: int = 4, paths: int = 12) -> dict[str, Any]:
    return description(
        worker(
            "w0",
            "prefill",
            kv_blocks={"free": 60, "leased": 15},
            requests={"running": 2, "waiting": 5},
            load={"prefill_tokens_per_s": 1834.0, "queued_prompt_tokens": 4400},
        ),
        worker(
            "w1",
            kv_blocks={"free": 30, "quarantined": 10},
            load={"decode_step_s": 0.0312},
            kv_peers=[loaded_from("w0", num_mib, done)],
        ),
        worker("w2", slot={"role": "prefill"}, state="draining"),
        missing("w3", "backing_off", starts=4, next_start_in_s=3.6, last_failure="exit code 1:\nno [memory]"),
        missing("w4", "placing", starts=0, node=""),
        nodes=[node("n0", is_head=True), node("n1"), node("n2", is_alive=False)],
        controller={
            "state": "answering",
            "incarnation": "c0ffee00c0ffee00",
            "failure": "",
            "decisions": DECISIONS,
        },
        gateway=gateway(in_flight=19, queued=2, paths={"disaggregated": paths, "fallback": 0, "local": 2}),
    )


def lines(view: TopView, width: int, height: int = 100) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view)
    return [line.rstrip() for line in captured.get().splitlines()]


def screen(width: int, height: int | None = None, **fields: Any) -> list[str]:
    before, now = fleet(), fleet(num_mib=35.0, done=14, paths=32)
    return lines(TopView("here:1", before, now, 2.0, height, **fields), width)


def row(shown: list[str], worker: str) -> str:
    """A worker's row, with single spaces."""
    (found,) = (line for line in shown if line.startswith(f"{worker} ") and ">" not in line.split()[1])
    return " ".join(found.split())


@pytest.mark.parametrize("width", [80, 100, 119, 120, 160, 250])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, screen(width))) <= width


def test_eighty_columns_hold_what_matters_of_every_worker() -> None:
    shown = screen(80)
    assert shown[0].startswith("baton top  smollm2 at here:1")
    assert shown[0].endswith("q leaves")
    assert shown[1] == "19 in flight, 2 queued   controller c0ffee00   2 of 3 nodes alive (n2 gone)"
    assert shown[2] == "paths  32 disaggregated (10.0/s), 0 fallback, 2 local"
    assert shown[3] == "1 failed, 0 rejected, 0 aborted; 5 moved to other workers (2 given back, 3 lost)"
    assert shown[5].split() == [
        *("worker", "role", "state", "blocks", "used", "run", "wait", "load", "step", "ms", "tok/s")
    ]
    assert row(shown, "w0") == "w0 prefill ready ████▓▓········ 40% 2 5 0 - 1.8k"
    assert row(shown, "w1") == "w1 decode ready ████████░····· 70% 0 0 0 31.2 -"
    assert "w2     > prefill draining" in "\n".join(shown)
    assert row(shown, "w3") == "w3 decode backing off 4 s"
    assert row(shown, "w4") == "w4 decode placing"


def test_a_wide_terminal_adds_nodes_queues_and_starts() -> None:
    shown = screen(160)
    assert shown[5].split()[3:5] == ["node", "blocks"]
    assert shown[5].split()[-8:] == ["queued", "tok", "oldest", "s", "hits", "drafts", "host", "starts"]
    assert "decode > prefill" in "\n".join(shown)
    assert row(shown, "w0").endswith("1.8k 4.4k 0.0 - - - 1")
    assert row(shown, "w3") == "w3 decode backing off 4 s n1 4"
    assert row(shown, "w4") == "w4 decode placing - 0"


def test_transfers_show_what_moved_between_two_looks() -> None:
    line = next(line for line in screen(80) if line.startswith("w0 > w1"))
    assert " ".join(line.split()) == f"w0 > w1 shared_memory 12.5 MiB/s {'━' * 10} 5.0/s 35 MiB in total"


def test_a_failure_is_one_line_whatever_it_holds() -> None:
    assert "w3: exit code 1: no [memory]" in screen(80)


def test_a_low_screen_keeps_every_worker_and_the_latest_decisions() -> None:
    shown = screen(80, height=24)
    assert len(shown) <= 24
    assert [line.split()[0] for line in shown[6:11]] == ["w0", "w1", "w2", "w3", "w4"]
    assert shown[-2:] == DECISIONS[-2:]


def test_more_workers_than_lines_are_counted() -> None:
    many = description(*(worker(f"w{index}") for index in range(50)))
    shown = lines(TopView("here:1", None, many, 0.0, height=24), 80)
    assert len(shown) == 24
    assert "33 more in `baton status`" in shown[-1]


def test_the_first_look_has_no_rates() -> None:
    shown = lines(TopView("here:1", None, fleet(), 0.0), 80)
    assert shown[2] == "paths  12 disaggregated, 0 fallback, 2 local"
    assert next(line for line in shown if line.startswith("w0 > w1")).split()[4:6] == ["0.0", "MiB/s"]


def test_what_is_old_says_so() -> None:
    assert "the data below is old: UNAVAILABLE: no gateway" in screen(80, notice="UNAVAILABLE: no gateway")


def test_an_absent_controller_is_named_with_the_reason() -> None:
    away = {"state": "away", "incarnation": "", "failure": "silent\nfor 1 s", "decisions": []}
    shown = lines(TopView("here:1", None, description(controller=away, nodes=[]), 0.0), 80)
    assert shown[1] == "3 in flight, 1 queued   controller away: silent for 1 s"


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [
        ((100, 100, 0, 0), "··········"),
        ((100, 0, 0, 0), "██████████"),
        ((100, 40, 20, 10), "███▓▓░····"),
        ((1000, 998, 1, 1), "▓░········"),
        ((1000, 997, 1, 1), "█▓░·······"),
        ((100, 1, 1, 1), "██████████"),
    ],
)
def test_a_bar_shows_every_kind_of_block(counts: tuple[int, int, int, int], drawn: str) -> None:
    total, free, leased, quarantined = counts
    blocks = {"total": total, "free": free, "leased": leased, "quarantined": quarantined}
    assert bar(blocks, 10).plain == drawn


def test_a_worker_that_was_restarted_counts_from_zero() -> None:
    before = description(worker("w1", incarnation="old", kv_peers=[loaded_from("w0", 100, 50)]))
    now = description(worker("w1", incarnation="new", kv_peers=[loaded_from("w0", 4, 2)]))
    (pair,) = rates.transfers(before, now, 2.0)
    assert (pair.bytes_per_s, pair.done_per_s) == (2 * 2**20, 1.0)


def test_a_worker_that_was_never_seen_has_no_rate() -> None:
    now = description(worker("w1", kv_peers=[loaded_from("w0", 4, 2)]))
    (pair,) = rates.transfers(description(), now, 2.0)
    assert (pair.bytes_per_s, pair.num_bytes) == (None, 4 * 2**20)


def test_transports_of_one_pair_add_up_and_the_busiest_pair_is_first() -> None:
    peers = [loaded_from("w0", 1, 1), loaded_from("w0", 2, 1, transport="zmq_tcp"), loaded_from("w2", 9, 1)]
    now = description(worker("w1", kv_peers=[*peers, loaded_from("w3", 99, 9, role="producer")]))
    first, second = rates.transfers(None, now, 0.0)
    assert (first.producer, second.producer) == ("w2", "w0")
    assert (second.num_bytes, second.transports) == (3 * 2**20, {"shared_memory", "zmq_tcp"})


def test_hits_are_recent_ones_or_all_without_recent_requests() -> None:
    def asked(queries: int, hits: int) -> dict[str, Any]:
        return worker("w0", counters={"prefix_cache_queries": queries, "prefix_cache_hits": hits})

    before = description(asked(100, 10))
    assert rates.hit_rate(before, asked(200, 100)) == 0.9
    assert rates.hit_rate(before, asked(100, 10)) == 0.1
    assert rates.hit_rate(None, worker("w0")) is None


def test_c61_acceptance_is_the_share_of_recent_drafts_that_were_right() -> None:
    def drafted(num_drafts: int, num_accepted: int) -> dict[str, Any]:
        names = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
        return worker("w0", counters=dict(zip(names, (num_drafts, num_accepted), strict=True)))

    before = description(drafted(100, 10))
    assert rates.acceptance_rate(before, drafted(200, 80)) == 0.7
    assert rates.acceptance_rate(before, drafted(100, 10)) == 0.1
    assert rates.acceptance_rate(None, worker("w0")) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (9.5, "9.5"),
        (9.96, "10"),
        (340.0, "340"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (1834.0, "1.8k"),
        (34_000.0, "34k"),
        (1_200_000, "1.2M"),
        (7e13, "7.0e+13"),
    ],
)
def test_amounts_are_short(value: float, text: str) -> None:
    assert words.amount(value) == text


@pytest.mark.parametrize(
    ("room", "num_workers", "sizes", "fitted"),
    [
        (100, 6, [5, 5, 5], (6, [5, 5, 5])),
        (24, 6, [5, 5, 5], (6, [4, 4, 4])),
        (20, 6, [5, 0, 1], (6, [5, 0, 1])),
        (10, 6, [5, 5, 5], (1, [2, 2, 2])),
        (30, 50, [0, 0, 0], (30, [0, 0, 0])),
    ],
)
def test_sections_give_way_before_workers_do(
    room: int, num_workers: int, sizes: list[int], fitted: tuple[int, list[int]]
) -> None:
    assert fit(room, num_workers, sizes) == fitted


@pytest.mark.parametrize(
    ("term", "complaint"),
    [("dumb", "this terminal cannot be redrawn (TERM)"), (None, "stdout is not a terminal")],
)
def test_a_screen_that_cannot_be_redrawn_is_refused_with_its_reason(
    term: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stdout for a terminal
    assert main(["top"]) == USAGE
    assert complaint in capsys.readouterr().err
