"""Secrets that the chart makes: good ones, once, and kept by an upgrade."""

import base64
import hashlib
import json
import ssl
from pathlib import Path

import pytest
import yaml

from baton.config import ApiKey
from baton.system.curve import ClusterSecret
from tests.factories.chart import Object, Release, merged, needs_helm, render
from tests.factories.kubernetes_api import render_over

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
    release = render({"metrics": PUBLIC["metrics"], "security": {"apiKeys": {"adminSha256": "a" * 64}}})
    made = secrets(release)
    assert set(made["api-keys"]) == {"keys.yaml"}, "hashes alone"
    entries = {entry.name: entry for entry in map(ApiKey.model_validate, _entries(made))}
    assert {name: entry.scopes for name, entry in entries.items()} == {
        "admin": ("generate", "observe", "administer"),
        "metrics": ("observe",),
        "helm-test": ("generate",),
    }
    assert entries["admin"].sha256 == "a" * 64
    for name, secret in (("metrics", "metrics-key"), ("helm-test", "test-key")):
        assert set(made[secret]) == {secret}, "a Secret of its own"
        assert entries[name].sha256 == hashlib.sha256(made[secret][secret].encode()).hexdigest()
    assert entries["helm-test"].requests_per_minute == 6
    (endpoint,) = release.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {
        "name": "demo-baton-metrics-key",
        "key": "metrics-key",
    }
    (variable,) = release.one("Pod")["spec"]["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "demo-baton-test-key", "key": "test-key"}
    config = release.one("Deployment")["spec"]["template"]["spec"]["volumes"]
    (files,) = (volume["projected"]["sources"] for volume in config if "projected" in volume)
    (keys,) = (
        source["secret"]["items"]
        for source in files
        if source.get("secret", {}).get("name", "").endswith("api-keys")
    )
    assert keys == [{"key": "keys.yaml", "path": "keys.yaml"}]


def test_the_url_of_stored_responses_comes_from_its_secret_alone() -> None:
    release = render({"gateway": {"responseStore": {"existingSecret": "store"}}})
    assert release.gateway_config()["gateway"]["response_store_file"] == "/etc/baton/response-store"
    volumes = release.one("Deployment")["spec"]["template"]["spec"]["volumes"]
    (files,) = (volume["projected"]["sources"] for volume in volumes if "projected" in volume)
    assert {"secret": {"name": "store", "items": [{"key": "url", "path": "response-store"}]}} in files


def _entries(made: dict[str, dict[str, str]]) -> list[Object]:
    entries: list[Object] = yaml.safe_load(made["api-keys"]["keys.yaml"])
    return entries


def test_no_administrators_key_is_made_and_the_notes_say_how_to_make_one() -> None:
    release = render()
    assert [entry["name"] for entry in _entries(secrets(release))] == ["metrics", "helm-test"]
    assert "--set-string security.apiKeys.adminSha256=" in release.notes
    told = render({"security": {"apiKeys": {"adminSha256": "a" * 64}}}).notes
    assert "adminSha256=" not in told
    assert "export BATON_API_KEY=...   # one of those in security.apiKeys" in told


def test_a_key_of_ones_own_has_its_entry_among_ones_own() -> None:
    own: Object = {"metricsKey": {"existingSecret": "mine"}, "testKey": {"existingSecret": "mine"}}
    entry = {"name": "mine", "sha256": "a" * 64, "scopes": ["generate", "administer"]}
    own["apiKeys"] = {"keys": [entry]}
    release = render({"security": own, "metrics": PUBLIC["metrics"]})
    assert yaml.safe_load(secrets(release)["api-keys"]["keys.yaml"]) == [entry]
    assert "demo-baton-test-key" not in json.dumps(release.objects)
    (endpoint,) = release.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "mine", "key": "metrics-key"}


def test_prometheus_gets_no_key_where_it_needs_none() -> None:
    values = {"config": {"gateway": {"metrics_need_key": False}}, "metrics": PUBLIC["metrics"]}
    for security in ({"apiKeys": {"existingSecret": "mine"}}, {"metricsKey": {"existingSecret": "mine"}}):
        (endpoint,) = render(values | {"security": security}).one("ServiceMonitor")["spec"]["endpoints"]
        assert "authorization" not in endpoint


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
    "name",
    ["demo-baton-grpc.llm.svc", "demo-baton-http", "localhost", "llm.example.com", "10.0.0.5", "fd00::5"],
)
def test_the_certificate_is_for_the_names_that_clients_use(name: str, tmp_path: Path) -> None:
    extra = ["llm.example.com", "10.0.0.5", "fd00::5"]
    made = secrets(render({"security": {"tls": {"extraNames": extra}}}))["tls"]
    assert shakes_hands(made, name, tmp_path)


def test_the_certificate_is_for_no_other_name(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="evil"):
        shakes_hands(secrets(render())["tls"], "evil.example.com", tmp_path)


def shakes_hands(made: dict[str, str], name: str, folder: Path) -> bool:
    """Whether a TLS handshake succeeds, in memory, between a client that trusts the authority and a gateway with this
    certificate."""
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


PUBLIC: Object = {
    "security": {
        "tls": {
            "mode": "certManager",
            "issuerRef": {"name": "public"},
            "internalNames": False,
            "hasAuthority": False,
            "extraNames": ["llm.example.com"],
        }
    },
    "metrics": {"serviceMonitor": {"enabled": True}},
}


def test_a_public_issuer_is_asked_for_no_name_that_it_refuses() -> None:
    assert render(PUBLIC).one("Certificate")["spec"]["dnsNames"] == ["llm.example.com"]
    internal = {"internalNames": True, "extraNames": ["llm.example.com", "10.0.0.5"]}
    names = render(merged(PUBLIC, {"security": {"tls": internal}})).one("Certificate")["spec"]
    assert {"localhost", "demo-baton-http", "llm.example.com"} <= set(names["dnsNames"])
    assert names["ipAddresses"] == ["10.0.0.5"]
    address = render(merged(PUBLIC, {"security": {"tls": {"extraNames": ["10.0.0.5"]}}}))
    assert "dnsNames" not in address.one("Certificate")["spec"]


def test_without_a_private_ca_its_certificate_is_not_requested() -> None:
    release = render(PUBLIC)
    assert "ca.crt" not in json.dumps(release.objects) + release.notes
    command = release.one("Pod")["spec"]["containers"][0]["command"]
    assert {"--target=llm.example.com:50051", "--tls"} <= set(command)
    assert monitored(release) == {"serverName": "llm.example.com"}
    assert "curl --resolve llm.example.com:8000:127.0.0.1 https://llm.example.com:8000/v1" in release.notes
    assert "baton status --target llm.example.com:50051 --tls\n" in release.notes


def test_with_one_they_trust_that_one() -> None:
    release = render({"metrics": PUBLIC["metrics"]})
    assert monitored(release) == {
        "serverName": "demo-baton-http",
        "ca": {"secret": {"name": "demo-baton-tls", "key": "ca.crt"}},
    }
    command = release.one("Pod")["spec"]["containers"][0]["command"]
    assert {"--target=demo-baton-grpc:50051", "--tls-ca=/etc/baton/ca.crt"} <= set(command)


def test_a_certificate_of_ones_own_is_verified_by_a_name_of_ones_own() -> None:
    own = {"mode": "existingSecret", "existingSecret": "mine", "serverName": "llm.example.com"}
    release = render({"security": {"tls": own}, "metrics": PUBLIC["metrics"]})
    assert monitored(release)["serverName"] == "llm.example.com"
    assert monitored(release)["ca"]["secret"]["name"] == "mine"


def monitored(release: Release) -> Object:
    """The TLS settings with which Prometheus scrapes a gateway."""
    config: Object = release.one("ServiceMonitor")["spec"]["endpoints"][0]["tlsConfig"]
    return config


EXISTING: Object = {
    "clusterSecret": {"existingSecret": "mine-1"},
    "rayToken": {"existingSecret": "mine-2"},
    "apiKeys": {"existingSecret": "mine-3"},
    "tls": {"mode": "existingSecret", "existingSecret": "mine-4"},
}


def test_with_secrets_of_ones_own_the_chart_makes_none() -> None:
    release = render({"security": EXISTING})
    assert release.of_kind("Secret") == {}
    assert release.of_kind("Pod") == {}, "`helm test` has no key"
    for number in range(1, 5):
        assert f'"mine-{number}"' in json.dumps(release.pods() | {"ray": release.ray})


def as_kept(secret: Object) -> Object:
    """The Secret as an API server keeps it: without `stringData`, and with helm's marks of its release."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in content(secret).items()}
    owner = {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "llm"}
    kept = {key: value for key, value in secret.items() if key != "stringData"}
    metadata = secret["metadata"] | {"annotations": secret["metadata"].get("annotations", {}) | owner}
    return kept | {"data": data, "metadata": metadata}


def test_an_upgrade_keeps_what_the_chart_made() -> None:
    kept = {name: as_kept(item) for name, item in render().of_kind("Secret").items()}
    del kept["demo-baton-ray-token"]
    found = {name: content(item) for name, item in render_over(kept.values()).of_kind("Secret").items()}
    assert {name: found[name] for name in kept} == {name: content(item) for name, item in kept.items()}
    assert len(found["demo-baton-ray-token"]["auth_token"]) == 43, "made anew, since it was not there"


def tls(values: Object, kept: Object | None = None) -> Object:
    """The Secret, made or kept with these values of security.tls."""
    whole: Object = {"security": {"tls": values}}
    release = render(whole) if kept is None else render_over([as_kept(kept)], whole)
    return release.one("Secret", "-tls")


@pytest.mark.parametrize("changes", [{"extraNames": ["llm.example.com"]}, {"validDays": 30}])
def test_another_certificate_is_made_when_another_one_is_asked_for(changes: Object, tmp_path: Path) -> None:
    before = tls({})
    after = tls(changes, before)
    assert content(after)["ca.crt"] != content(before)["ca.crt"], "the old authority's key is nowhere"
    assert shakes_hands(content(after), "localhost", tmp_path)
    assert content(tls(changes, after)) == content(after), "once"


def test_a_certificate_that_does_not_say_what_it_was_made_of_is_kept() -> None:
    """An earlier chart made the certificate, and did not record what it was made of."""
    before = tls({})
    del before["metadata"]["annotations"]
    after = tls({"extraNames": ["llm.example.com"]}, before)
    assert content(after) == content(before)
    assert "annotations" not in after["metadata"], "or it would seem to have these names"
