"""A real Prometheus scrapes a real cluster under load: every query of the dashboard has an answer, and every alert can
be evaluated.

    BATON_PROMETHEUS=/usr/bin python -m pytest -m by_hand tests/slow/test_prometheus.py

BATON_PROMETHEUS is the folder with `prometheus` and `promtool`; by default they are looked for on the path.
"""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient, GatewayError
from tests.factories.chart import needs_helm, render
from tests.factories.metrics import read_url
from tests.factories.models import make_model_dir
from tests.factories.promql import ALERTS, FOLDER, alert_expressions, dashboard_expressions

pytestmark = pytest.mark.by_hand

LOAD_S = 30.0
QUIET = {"BatonGatewayDown", "BatonNoDecodeWorker", "BatonNoPrefillWorker", "BatonWorkerDead"}
"""Alerts that must not be raised here."""


def tool(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("BATON_PROMETHEUS"))
    if found is None:
        pytest.skip(f"{name} is not installed: set BATON_PROMETHEUS to the folder that has it")
    return found


def check(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], input=text, capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_rules_and_their_tests_pass_promtool() -> None:
    assert check("check", "rules", str(ALERTS)) == ""
    assert check("test", "rules", str(FOLDER / "alerts_test.yaml")) == ""
    assert check("check", "config", "--syntax-only", str(FOLDER / "prometheus.yaml")) == ""


@needs_helm
def test_of_two_releases_in_one_prometheus_the_one_without_workers_or_gateways_raises_alerts(
    tmp_path: Path,
) -> None:
    """The rules are those that the chart renders for each release. A worker of the same name in the other
    release adds nothing."""
    for name in ("blue", "green", "red"):
        rule = render({"metrics": {"prometheusRule": {"enabled": True}}}, name=name).one("PrometheusRule")
        groups = [group | {"name": name} for group in rule["spec"]["groups"]]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"groups": groups}))
    series = {
        'up{job="baton-gateway", baton_release="llm/blue", instance="g0"}': "1x30",
        'up{job="baton-gateway", baton_release="llm/green", instance="g0"}': "1x30",
        'baton_fleet_workers{baton_release="llm/blue", instance="g0", role="decode", state="ready"}': "0x30",
        'baton_fleet_workers{baton_release="llm/green", instance="g0", role="decode", state="ready"}': "2x30",
        'baton_num_preemptions_total{baton_release="llm/blue", worker="w0"}': "0+5x30",
        'baton_num_preemptions_total{baton_release="llm/green", worker="w0"}': "0+5x30",
    }

    def raised(alert: str, *releases: str) -> dict[str, Any]:
        labels = [{"severity": "critical", "baton_release": f"llm/{name}"} for name in releases]
        return {"eval_time": "25m", "alertname": alert, "labels": labels}

    expected = [
        raised("BatonNoDecodeWorker", "blue"),
        raised("BatonGatewayDown", "red"),
        raised("BatonPreempts"),
    ]
    tests = {
        "rule_files": sorted(str(path) for path in tmp_path.glob("*.yaml")),
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [alert_test(**each) for each in expected],
            }
        ],
    }
    (tmp_path / "test.json").write_text(json.dumps(tests))
    assert check("test", "rules", str(tmp_path / "test.json")) == ""


def alert_test(eval_time: str, alertname: str, labels: list[dict[str, str]]) -> dict[str, Any]:
    """A test of this alert, in the form that promtool reads. The texts are those of the plain file."""
    (rule,) = (
        rule
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == alertname
    )
    texts = {
        key: re.sub(r"\{\{ (?:with|if) .*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", text)
        for key, text in rule["annotations"].items()
    }
    of_absent = {"job": "baton-gateway"} if alertname == "BatonGatewayDown" else {}
    alerts = [{"exp_labels": each | of_absent, "exp_annotations": texts} for each in labels]
    return {"eval_time": eval_time, "alertname": alertname, "exp_alerts": alerts}


def test_a_real_prometheus_finds_everything_that_the_dashboard_asks_for(tmp_path: Path) -> None:
    async def test() -> None:
        folder = make_model_dir(tmp_path / "model")
        config = BatonConfig.from_mapping(
            {
                "model": {"dtype": "float32"},
                "engine": {"num_threads": 1},
                "scheduler": {"num_blocks": 100, "max_num_batched_tokens": 64},
                "speculation": {"method": "ngram", "prompt_lookup_min": 1},
                "gateway": {"grpc_port": 0, "http_port": 0, "max_in_flight": 3},
                "cluster": {"prefill": 1, "decode": 2},
            }
        )
        async with child_processes(config, folder) as running, GatewayClient(running.target) as client:
            url = f"127.0.0.1:{running.gateway.http_port}"
            prometheus, process = start_prometheus(tmp_path, url)
            try:
                loading = asyncio.create_task(load(client))
                await asyncio.sleep(LOAD_S)
                await everything_answers(prometheus)
                loading.cancel()
                targets = json.loads(await asyncio.to_thread(read_url, f"http://{url}/metrics/targets"))
                for address in (url, *(address for target in targets for address in target["targets"])):
                    exposed = await asyncio.to_thread(read_url, f"http://{address}/metrics")
                    problems = check("check", "metrics", text=exposed).splitlines()
                    assert [line for line in problems if not is_vllms(line)] == []
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, 20)

    asyncio.run(asyncio.wait_for(test(), 180))


def start_prometheus(folder: Path, gateway: str) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Starts Prometheus with the shipped configuration, except for addresses and intervals."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text().replace("127.0.0.1:8000", gateway))
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][1]["http_sd_configs"][0]["refresh_interval"] = "1s"
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    shutil.copy(ALERTS, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            tool("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=log,
    )
    log.close()
    return f"http://127.0.0.1:{port}", process


async def load(client: GatewayClient) -> None:
    """Requests of every kind. Some of them fail, and the clients of some leave."""

    async def ask(number: int, **options: Any) -> None:
        tokens = [(number * 31 + offset) % 400 + 3 for offset in range(100)]
        try:
            async for _ in client.generate(
                token_ids=tokens, sampling={"max_tokens": 8, "ignore_eos": True}, **options
            ):
                if number % 7 == 6:
                    return
        except GatewayError:
            return

    number = 0
    while True:
        modes = ("disaggregated", "local", "disaggregated", None)
        timeout_s = 0.001 if number % 5 == 4 else None
        await asyncio.gather(
            *[ask(number + i, mode=modes[i % 4], timeout_s=timeout_s) for i in range(6)],
            return_exceptions=True,
        )
        number += 6


async def everything_answers(prometheus: str) -> None:
    silent = []
    for where, expression in dashboard_expressions():
        result = await query(
            prometheus, expression.replace("$__rate_interval", "20s").replace("$release", "")
        )
        if not any(value(sample) >= 0.0 for sample in result):
            silent.append(f"{where}: {expression}")
    assert silent == []
    raised = {name for name, expression in alert_expressions() if await query(prometheus, expression)}
    assert raised & QUIET == set()
    ups = await query(prometheus, "up")
    assert [value(sample) for sample in ups] == [1.0] * 4
    rules = json.loads(await asyncio.to_thread(read_url, f"{prometheus}/api/v1/rules"))["data"]["groups"]
    assert [rule["name"] for group in rules for rule in group["rules"] if rule["health"] == "err"] == []


async def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    answer = json.loads(await asyncio.to_thread(read_url, url))
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def value(sample: dict[str, Any]) -> float:
    """The value of a query. NaN, for example a share of nothing, is no answer, and compares false."""
    return float(sample["value"][1])


def is_vllms(line: str) -> bool:
    """Whether promtool criticizes a name that Baton has from vLLM."""
    return line.startswith(("baton_iteration_tokens_total", "baton_kv_cache_usage_perc"))
