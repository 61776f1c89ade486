"""Secrets that the chart makes: good ones, once, and kept by an upgrade."""

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.access_config import ApiKey
from baton.curve import ClusterSecret
from tests.factories.chart import FOLDER, Object, Release, helm, needs_helm, render

pytestmark = needs_helm


def content(secret: Object) -> dict[str, str]:
    """As pods see it."""
    data: dict[str, str] = secret.get("data", {})
    plain: dict[str, str] = secret.get("stringData", {})
    return {key: base64.b64decode(value).decode() for key, value in data.items()} | plain


def secrets(release: Release) -> dict[str, dict[str, str]]:
    return {
        name.removeprefix("demo-baton-"): content(item) for name, item in release.of_kind("Secret").items()
    }


def test_gateways_admit_the_keys_that_the_chart_makes() -> None:
    made = secrets(render())["api-keys"]
    entries = {entry["name"]: ApiKey.model_validate(entry) for entry in yaml.safe_load(made["keys.yaml"])}
    for name, scopes in (("admin", ("generate", "observe", "administer")), ("metrics", ("observe",))):
        assert entries[name].sha256 == hashlib.sha256(made[f"{name}-key"].encode()).hexdigest()
        assert entries[name].scopes == scopes
    config = render().one("Deployment")["spec"]["template"]["spec"]["volumes"]
    (files,) = (volume["projected"]["sources"] for volume in config if "projected" in volume)
    (keys,) = (
        source["secret"]["items"]
        for source in files
        if source.get("secret", {}).get("name", "").endswith("api-keys")
    )
    assert keys == [{"key": "keys.yaml", "path": "keys.yaml"}], "gateways see hashes alone"


def test_keys_of_ones_own_stand_beside_them() -> None:
    entry = {"name": "alice", "sha256": "a" * 64, "requests_per_minute": 60}
    made = secrets(render({"security": {"apiKeys": {"keys": [entry]}}}))["api-keys"]
    assert yaml.safe_load(made["keys.yaml"])[2] == entry


def test_baton_takes_the_clusters_secret_and_two_are_never_the_same() -> None:
    made = [secrets(render({"podSecurityContext": {"runAsUser": user}})) for user in (1, 2)]
    for each in made:
        ClusterSecret(each["cluster"]["cluster-secret"])
    values = [
        value
        for each in made
        for value in (each["cluster"]["cluster-secret"], each["ray-token"]["auth_token"])
    ]
    assert len(set(values)) == 4


@pytest.mark.parametrize(
    "name", ["demo-baton-grpc.llm.svc", "demo-baton-http", "localhost", "llm.example.com"]
)
def test_the_certificate_is_for_the_names_that_clients_use(name: str, tmp_path: Path) -> None:
    made = secrets(render({"security": {"tls": {"extraNames": ["llm.example.com"]}}}))["tls"]
    assert shakes_hands(made, name, tmp_path)


def test_the_certificate_is_for_no_other_name(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="evil"):
        shakes_hands(secrets(render())["tls"], "evil.example.com", tmp_path)


def shakes_hands(made: dict[str, str], name: str, folder: Path) -> bool:
    """A client that trusts the authority, with a gateway of that certificate, in memory."""
    for key in ("tls.crt", "tls.key"):
        (folder / key).write_text(made[key])
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client_context = ssl.create_default_context(cadata=made["ca.crt"])
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(up, down, server_side=True)
    client = client_context.wrap_bio(down, up, server_hostname=name)
    done = set()
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
    return done == {client, server}


EXISTING: Object = {
    "clusterSecret": {"existingSecret": "mine-1"},
    "rayToken": {"existingSecret": "mine-2"},
    "apiKeys": {"existingSecret": "mine-3"},
    "tls": {"mode": "existingSecret", "existingSecret": "mine-4"},
}


def test_with_secrets_of_ones_own_the_chart_makes_none() -> None:
    release = render({"security": EXISTING})
    assert release.of_kind("Secret") == {}
    for number in range(1, 5):
        assert f'"mine-{number}"' in json.dumps(release.pods() | {"ray": release.ray})


def discovery(release: Release) -> dict[str, Object]:
    """What an API server that knows the kinds of this release answers when it is asked what it knows."""
    kinds: dict[str, set[str]] = {}
    for item in release.objects:
        kinds.setdefault(item["apiVersion"], set()).add(item["kind"])
    groups = []
    answers: dict[str, Object] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for version, names in kinds.items():
        resources = [
            {
                "name": f"{name.lower()}s",
                "singularName": name.lower(),
                "namespaced": True,
                "kind": name,
                "verbs": ["get"],
            }
            for name in names
        ]
        answer = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        answers[f"/{'apis' if '/' in version else 'api'}/{version}"] = answer
        if "/" in version:
            entry = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [entry], "preferredVersion": entry})
    return answers | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


@contextmanager
def api_server(release: Release, kept: dict[str, Object]) -> Iterator[str]:
    """As much of Kubernetes' API as helm asks when it looks these Secrets up."""
    answers = discovery(release)
    for name, item in kept.items():
        answers[f"/api/v1/namespaces/llm/secrets/{name}"] = item

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            missing = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or missing).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not into the output of tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def as_kept(secret: Object) -> Object:
    """By an API server, which has no `stringData`; with helm's mark of whose it is."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in content(secret).items()}
    owner = {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "llm"}
    kept = {key: value for key, value in secret.items() if key != "stringData"}
    return kept | {"data": data, "metadata": secret["metadata"] | {"annotations": owner}}


def test_an_upgrade_keeps_what_the_chart_made() -> None:
    release = render()
    kept = {name: as_kept(item) for name, item in release.of_kind("Secret").items()}
    del kept["demo-baton-ray-token"]
    with api_server(release, kept) as address:
        where = ("--dry-run=server", "--kube-apiserver", address, "--disable-openapi-validation")
        text = helm("template", "demo", str(FOLDER), "--namespace", "llm", *where)
    items = [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    found = {item["metadata"]["name"]: content(item) for item in items if item["kind"] == "Secret"}
    assert {name: found[name] for name in kept} == {name: content(item) for name, item in kept.items()}
    assert len(found["demo-baton-ray-token"]["auth_token"]) == 43, "made anew, since it was not there"
