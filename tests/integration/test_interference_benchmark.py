"""The interference benchmark in small: its client asks a real server, and its figures follow from the measured
times."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from baton.errors import ConfigError
from benchmarks import interference_sides
from benchmarks.interference import main, over_peer
from benchmarks.interference_load import Seen, Slo, Workload, figures, percentile
from benchmarks.interference_picture import draw
from benchmarks.interference_sides import VLLM
from benchmarks.peer import ROOT
from tests.factories.serving import FORKING_COMMAND

CHAT = Seen(True, 1.0, (1.5, 1.6, 1.8), 3)
SLOW_CHAT = Seen(True, 2.0, (4.0, 4.1, 4.2), 3)
LONG = Seen(False, 0.5, (3.5,), 1)
WORKLOAD = Workload(seconds=4.0)


@pytest.mark.slow
def test_a_small_run_answers_every_request_and_leaves_a_table_a_file_and_a_picture(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side, start = "Baton, 1 P + 1 D", interference_sides._process
    monkeypatch.setattr(
        interference_sides, "_process", lambda command, env: start([*FORKING_COMMAND, *command[3:]], env)
    )
    options = ["--model", str(folder), "--sides", side]
    options += ["--rounds", "1", "--seconds", "2", "--long-every", "0.5", "--long-prompt", "300"]
    options += ["--num-chats", "2", "--chat-prompt", "8", "--chat-answer", "6"]
    options += ["--set", "engine.kv_cache_memory_mib=32", "model.dtype=float32"]
    result_file = tmp_path / "new" / "result.json"
    options += ["--json", str(result_file), "--svg", str(tmp_path / "picture.svg")]
    monkeypatch.setattr(sys, "argv", ["interference", *options])
    main()
    assert side in capsys.readouterr().out
    result = json.loads(result_file.read_text())
    measured = result["sides"][side]
    assert measured["num_long_prompts"] == 4
    assert measured["num_chats"] >= 2
    assert measured["tokens_per_s"] > 0
    assert 0 < measured["gap_p50_ms"] <= measured["gap_p99_ms"] <= measured["gap_max_ms"]
    assert result["over_peer"] == {}
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")


def test_a_killed_benchmark_leaves_no_server() -> None:
    """A benchmark may be killed by `timeout`, or because the machine has too little memory."""
    script = """
from benchmarks.interference_sides import _process
with _process(["sleep", "1000"], {}) as server:
    print(server.pid, flush=True)
    input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        server = os.pidfd_open(int(benchmark.stdout.readline()))
        benchmark.kill()
        assert select.select([server], [], [], 60.0)[0] == [server], "it still runs"
        os.close(server)


def test_a_key_that_baton_does_not_have_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["interference", "--model", str(folder), "--set", "engine.speed=9"])
    with pytest.raises(ConfigError, match=r"engine\.speed"):
        main()


def test_figures_of_what_clients_saw() -> None:
    found = figures([[CHAT, SLOW_CHAT, LONG]], WORKLOAD, Slo(ttft_s=1.0, gap_s=0.25))
    assert found["gap_p50_ms"] == pytest.approx(100)
    assert found["gap_max_ms"] == pytest.approx(200)
    assert found["chat_ttft_p50_ms"] == pytest.approx(500)
    assert found["chat_ttft_p99_ms"] == pytest.approx(2000)
    assert found["long_ttft_p99_ms"] == pytest.approx(3000)
    assert found["tokens_per_s"] == pytest.approx(5 / 4), "two came after the round"
    assert (found["goodput_chats_per_s"], found["good_share"]) == (0.25, 0.5)
    slower = figures([[SLOW_CHAT, LONG]], WORKLOAD, Slo(1.0, 0.25))
    assert over_peer({"Baton": slower, VLLM: found})["Baton"]["chat_ttft_p50_ms"] == pytest.approx(4.0)


def test_without_long_prompts_there_are_no_figures_about_them() -> None:
    found = figures([[CHAT]], WORKLOAD, Slo(1.0, 0.25))
    assert not [key for key in found if key.startswith("long_")]
    assert found["num_long_prompts"] == 0


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_the_picture_has_a_bar_for_each_gap_and_a_mark_for_each_long_prompt() -> None:
    seen = [CHAT, SLOW_CHAT, LONG]
    text = draw({"Baton <1>": seen}, {"Baton <1>": figures([seen], WORKLOAD, Slo(1.0, 0.25))}, WORKLOAD)
    root = ElementTree.fromstring(text)
    paths = {path.get("class"): path.get("d") or "" for path in root.iter("{http://www.w3.org/2000/svg}path")}
    assert paths["gap"].count("M") == 4
    assert "long" in paths
    assert any("Baton <1>" in (each.text or "") for each in root.iter())
