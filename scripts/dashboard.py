"""The Grafana dashboard. ROWS has an entry for each panel. `python -m scripts.chart` writes the dashboard to a file."""

import re
from dataclasses import dataclass
from typing import Any

WIDTH = 24
HEIGHT = 8


@dataclass(frozen=True)
class GrafanaPanel:
    """A graph, or with `is_stat` a number. The keys of `queries` are their legends."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""
    is_stacked: bool = False
    is_stat: bool = False

    @property
    def width(self) -> int:
        return 4 if self.is_stat else 8


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """Median, 95th and 99th percentile of a histogram."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    rates = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    return {
        f"p{share * 100:.0f}{legend}": f"histogram_quantile({share}, {rates})" for share in (0.5, 0.95, 0.99)
    }


def rate(metric: str, by: str, *, selector: str = "") -> dict[str, str]:
    """The rate of a counter, per second, for each combination of labels."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return {legend: f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"}


def mean_parts(metric: str) -> dict[str, str]:
    """The mean of each part of a time; stacked, the parts are the mean of the whole."""
    of_all = f"sum by (part) (rate({metric}_count[$__rate_interval]))"
    return {"{{part}}": f"sum by (part) (rate({metric}_sum[$__rate_interval])) / {of_all}"}


def ready(role: str) -> dict[str, str]:
    """The number of ready workers. If gateways see different numbers, the largest counts."""
    return {"": f'max(sum by (instance) (baton_fleet_workers{{role="{role}", state="ready"}}))'}


ROWS: dict[str, list[GrafanaPanel]] = {
    "Now": [
        GrafanaPanel("Prefill workers", "none", ready("prefill"), "Ready workers", is_stat=True),
        GrafanaPanel("Decode workers", "none", ready("decode"), "Ready workers", is_stat=True),
        GrafanaPanel("In flight", "none", {"": "sum(baton_gateway_requests_in_flight)"}, is_stat=True),
        GrafanaPanel(
            "Queued", "none", {"": "sum(baton_gateway_requests_queued)"}, "At gateways", is_stat=True
        ),
        GrafanaPanel("Oldest queued", "s", {"": "max(baton_gateway_oldest_queued_seconds)"}, is_stat=True),
        GrafanaPanel(
            "Tokens per second",
            "none",
            {"": "sum(rate(baton_generation_tokens_total[$__rate_interval]))"},
            is_stat=True,
        ),
    ],
    "What clients get": [
        GrafanaPanel("Time to first token", "s", quantiles("baton_time_to_first_token_seconds")),
        GrafanaPanel(
            "Time between tokens",
            "s",
            quantiles("baton_inter_token_latency_seconds"),
            "Of requests that have ended",
        ),
        GrafanaPanel("Whole requests", "s", quantiles("baton_e2e_request_latency_seconds")),
        GrafanaPanel("Requests", "reqps", rate("baton_requests_total", "api, outcome")),
        GrafanaPanel(
            "Tokens",
            "none",
            {
                "prompt": "sum(rate(baton_prompt_tokens_total[$__rate_interval]))",
                "prompt, cached": "sum(rate(baton_prompt_tokens_cached_total[$__rate_interval]))",
                "answer": "sum(rate(baton_generation_tokens_total[$__rate_interval]))",
            },
        ),
        GrafanaPanel(
            "Calls answered with an error",
            "reqps",
            rate("baton_call_errors_total", "api, error"),
            "By class of error, including refused calls",
        ),
        GrafanaPanel(
            "Errors", "reqps", rate("baton_request_errors_total", "error"), "Requests without an answer"
        ),
    ],
    "Where the time goes": [
        GrafanaPanel(
            "Time to first token, by part",
            "s",
            mean_parts("baton_ttft_part_seconds"),
            "The mean of each part; stacked, they are the mean time to first token",
            is_stacked=True,
        ),
        GrafanaPanel(
            "From token 0 to token 1, by part",
            "s",
            mean_parts("baton_handover_part_seconds"),
            "The cost of a hand-over for a client: the part that no overlap hides, and the decode worker's first step",
            is_stacked=True,
        ),
        GrafanaPanel("From token 0 to token 1", "s", quantiles("baton_handover_gap_seconds")),
        GrafanaPanel(
            "Paths",
            "reqps",
            rate("baton_request_paths_total", "path, reason"),
            "The reason says why a request was not disaggregated",
        ),
        GrafanaPanel("Migrated requests", "reqps", rate("baton_request_migrations_total", "cause")),
        GrafanaPanel("Queued at gateways", "none", {"{{instance}}": "baton_gateway_requests_queued"}),
    ],
    "Hand-overs": [
        GrafanaPanel("Exposed time", "s", quantiles("baton_kv_handover_exposed_seconds", "transport")),
        GrafanaPanel("Time in transfer", "s", quantiles("baton_kv_handover_moving_seconds", "transport")),
        GrafanaPanel(
            "Bytes",
            "Bps",
            rate("baton_kv_peer_bytes_total", "worker, transport", selector='{end="consumer"}'),
        ),
        GrafanaPanel("Hand-overs by outcome", "reqps", rate("baton_kv_peer_handovers_total", "end, outcome")),
        GrafanaPanel(
            "Bytes per hand-over",
            "bytes",
            {
                "mean {{transport}}": "sum by (transport) (rate(baton_kv_handover_bytes_sum[$__rate_interval])) / "
                "sum by (transport) (rate(baton_kv_handover_bytes_count[$__rate_interval]))"
            },
        ),
        GrafanaPanel(
            "Blocks held for hand-overs",
            "none",
            {"{{worker}} {{state}}": 'baton_kv_blocks{state=~"leased|quarantined"}'},
        ),
    ],
    "Workers": [
        GrafanaPanel("Running requests", "none", {"{{worker}} {{role}}": "baton_num_requests_running"}),
        GrafanaPanel("Waiting requests", "none", {"{{worker}} {{role}}": "baton_num_requests_waiting"}),
        GrafanaPanel("Requests waiting for KV", "none", {"{{worker}}": "baton_num_requests_loading"}),
        GrafanaPanel("KV blocks in use", "percentunit", {"{{worker}} {{role}}": "baton_kv_cache_usage_perc"}),
        GrafanaPanel(
            "Prefix cache, share of tokens that hit",
            "percentunit",
            {
                "{{worker}}": "sum by (worker) (rate(baton_prefix_cache_hits_total[$__rate_interval])) / "
                "sum by (worker) (rate(baton_prefix_cache_queries_total[$__rate_interval]))"
            },
        ),
        GrafanaPanel(
            "Drafts, share that was right",
            "percentunit",
            {
                "{{worker}}": "sum by (worker) (rate(baton_spec_decode_num_accepted_tokens_total[$__rate_interval])) / "
                "sum by (worker) (rate(baton_spec_decode_num_draft_tokens_total[$__rate_interval]))"
            },
            "Of speculative decoding",
        ),
        GrafanaPanel("Preemptions", "reqps", rate("baton_num_preemptions_total", "worker")),
        GrafanaPanel("Time of a step", "s", quantiles("baton_step_seconds", "kind")),
        GrafanaPanel("Tokens of a step", "none", quantiles("baton_iteration_tokens_total")),
        GrafanaPanel("Tokens computed", "none", rate("baton_worker_computed_tokens_total", "worker, kind")),
    ],
    "Processes": [
        GrafanaPanel(
            "Workers by state", "none", {"{{role}} {{state}}": "max by (role, state) (baton_fleet_workers)"}
        ),
        GrafanaPanel("HTTP responses", "reqps", rate("baton_http_responses_total", "route, status")),
        GrafanaPanel("gRPC calls", "reqps", rate("baton_grpc_calls_total", "method, code")),
        GrafanaPanel(
            "Event loop lag of gateways",
            "s",
            quantiles("baton_event_loop_lag_seconds")
            | {"longest {{instance}}": "baton_event_loop_longest_stall_seconds"},
            "How long everything on the event loop waits",
        ),
        GrafanaPanel("Memory", "bytes", {"{{job}} {{instance}}": "process_resident_memory_bytes"}),
        GrafanaPanel(
            "CPU",
            "none",
            {"{{job}} {{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"},
            "Cores",
        ),
    ],
}

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

RELEASE: dict[str, Any] = {
    "name": "release",
    "label": "Release",
    "type": "query",
    "datasource": DATASOURCE,
    "definition": "label_values(baton_build_info, baton_release)",
    "query": {"query": "label_values(baton_build_info, baton_release)", "refId": "release"},
    "refresh": 2,
    "sort": 1,
    "includeAll": False,
    "multi": False,
}
"""The dashboard's variable that chooses a release of the Helm chart. Without the chart, metrics have no label
`baton_release`: then the variable is empty, and matches metrics without the label."""


def of_release(query: str) -> str:
    """The query, restricted to the metrics of the chosen release. Each metric gets braces, which are joined with braces
    that follow."""
    marked = re.sub(r"\b((?:baton|process)_[a-z0-9_]+)\b", r'\1{baton_release="$release"}', query)
    return marked.replace('"}{', '", ')


def dashboard() -> dict[str, Any]:
    """The dashboard, for import into Grafana 9 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y += 1
        x, height = 0, HEIGHT
        for panel in row:
            height = 4 if panel.is_stat else HEIGHT
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": panel.width, "h": height}))
            x += panel.width
            if x >= WIDTH:
                x, y = 0, y + height
        y += height if x else 0
    return {
        "uid": "baton",
        "title": "Baton",
        "tags": ["baton", "llm"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                RELEASE,
            ]
        },
        "panels": panels,
    }


def _panel(panel: GrafanaPanel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal"}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if not panel.is_stat:
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {} if panel.is_stat else custom},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": of_release(query),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }
