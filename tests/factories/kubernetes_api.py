"""The part of Kubernetes' API that helm calls when a template looks up objects of a cluster."""

import json
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from tests.factories.chart import FOLDER, Object, Release, helm

PLURALS = {
    ("v1", "Secret"): "secrets",
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Pod"): "pods",
    ("apps/v1", "Deployment"): "deployments",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "horizontalpodautoscalers",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    ("ray.io/v1", "RayCluster"): "rayclusters",
}
"""The kinds that this cluster has, by version."""

MISSING: Object = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "NotFound",
    "code": 404,
}


def render_over(existing: Iterable[Object], values: Mapping[str, Any] | None = None) -> Release:
    """The upgrade of the release `demo` in a cluster with these objects, without notes."""
    with api_server(existing) as address, tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values or {}, file)
        file.flush()
        where = (
            "--dry-run=server",
            "--kube-apiserver",
            address,
            "--disable-openapi-validation",
            "--is-upgrade",
        )
        text = helm("template", "demo", str(FOLDER), "--namespace", "llm", "--values", file.name, *where)
    return Release(tuple(item for item in yaml.load_all(text, yaml.CSafeLoader) if item), "")


@contextmanager
def api_server(existing: Iterable[Object]) -> Iterator[str]:
    """Serves the API, and yields its address."""
    answers = discovery() | {path_of(item): item for item in existing}

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or MISSING).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps log lines out of the output of tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def path_of(item: Object) -> str:
    version, kind = item["apiVersion"], item["kind"]
    return f"{root_of(version)}/namespaces/llm/{PLURALS[version, kind]}/{item['metadata']['name']}"


def root_of(version: str) -> str:
    return f"/{'apis' if '/' in version else 'api'}/{version}"


def discovery() -> dict[str, Object]:
    """The answers to questions about the kinds that this cluster has."""
    answers: dict[str, Object] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version in sorted({version for version, _ in PLURALS}):
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
            for (of, kind), plural in PLURALS.items()
            if of == version
        ]
        answers[root_of(version)] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": resources,
        }
        if "/" in version:
            group, _, number = version.partition("/")
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return answers | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}
