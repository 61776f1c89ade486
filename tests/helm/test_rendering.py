"""The chart renders for every kind of cluster, into objects that Kubernetes and KubeRay accept."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.factories.chart import FOLDER, VALUES_OF_CI, Object, containers, helm, needs_helm, refusal, render

pytestmark = needs_helm

KUBERNETES = ("1.30", "1.34", "1.37")
CRDS = os.environ.get("KUBERAY_CRDS", "")
OTHERS = {"cert-manager.io/v1", "monitoring.coreos.com/v1", "ray.io/v1"}
"""Not Kubernetes' own."""

every_cluster = pytest.mark.parametrize(
    "values", VALUES_OF_CI, ids=lambda path: path.name.removesuffix("-values.yaml")
)


def test_lint_finds_nothing() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(FOLDER))


def test_there_are_values_for_four_kinds_of_clusters() -> None:
    names = {path.name.removesuffix("-values.yaml") for path in VALUES_OF_CI}
    assert names == {"cpu-only", "one-gpu-node", "four-prefill-eight-decode", "production"}


@pytest.fixture(scope="module")
def kubernetes_validate() -> Iterator[Any]:
    """The package `kubernetes_validate`, changed to read each schema from disk only once."""
    package = pytest.importorskip("kubernetes_validate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package.utils, "schema_contents", cache(package.utils.schema_contents))
        yield package


@pytest.mark.parametrize(
    ("values", "version"),
    [
        (path, version)
        for path in VALUES_OF_CI
        for version in KUBERNETES
        if path is VALUES_OF_CI[-1] or version == KUBERNETES[-1]
    ],
    ids=lambda value: value.name.removesuffix("-values.yaml") if isinstance(value, Path) else value,
)
def test_kubernetes_accepts_every_object(values: Path, version: str, kubernetes_validate: Any) -> None:
    for item in render(values).objects:
        if item["apiVersion"] not in OTHERS:
            kubernetes_validate.validate(item, version, strict=True)


def test_kubernetes_would_not_accept_an_unknown_field(kubernetes_validate: Any) -> None:
    service = render().one("Service", "-grpc")
    broken = service | {"spec": service["spec"] | {"sessionAfinity": "None"}}
    with pytest.raises(kubernetes_validate.ValidationError, match="sessionAfinity"):
        kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)


@every_cluster
def test_kuberay_accepts_the_cluster(values: Path) -> None:
    if not CRDS:
        pytest.skip("KUBERAY_CRDS names no folder with ray.io_rayclusters.yaml")
    errors = [
        f"{error.json_path}: {error.message}"
        for error in ray_cluster_schema().iter_errors(render(values).one("RayCluster"))
    ]
    assert errors == []


def test_kuberay_would_not_accept_an_unknown_field() -> None:
    if not CRDS:
        pytest.skip("KUBERAY_CRDS names no folder with ray.io_rayclusters.yaml")
    cluster = render().one("RayCluster")
    broken = cluster | {"spec": cluster["spec"] | {"workerGroups": []}}
    assert ["workerGroups" in error.message for error in ray_cluster_schema().iter_errors(broken)] == [True]


@cache
def ray_cluster_schema() -> Any:
    import jsonschema

    definition = yaml.load((Path(CRDS) / "ray.io_rayclusters.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def strict(part: Any) -> Any:
    """A CRD's schema, changed to refuse fields that it does not name, as `kubectl apply --validate=strict` does."""
    if isinstance(part, list):
        return [strict(each) for each in part]
    if not isinstance(part, dict):
        return part
    kept = {
        key: value
        for key, value in part.items()
        if key not in ("default", "description", "format", "nullable")
    }
    if kept.pop("x-kubernetes-int-or-string", False):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    is_open = kept.pop("x-kubernetes-preserve-unknown-fields", False)
    named = {name: strict(inner) for name, inner in kept.get("properties", {}).items()}
    result = {key: strict(value) for key, value in kept.items()}
    if named:
        result["properties"] = named
        if not is_open:
            result.setdefault("additionalProperties", False)
    return result


@every_cluster
def test_no_container_may_more_than_it_must(values: Path) -> None:
    release = render(values)
    for component, pod in release.pods().items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, component
        may_ask = component == "head" and release.ray["enableInTreeAutoscaling"]
        assert spec["automountServiceAccountToken"] is may_ask, component
        for name, container in containers(pod).items():
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name
    assert [item["kind"] for item in release.objects if "Role" in item["kind"]] == []


@every_cluster
def test_the_pod_of_helm_test_is_admitted_where_the_others_are(values: Path) -> None:
    """A registry may need a Secret, and a quota may need resources."""
    release = render(values)
    spec = release.one("Pod")["spec"]
    gateway = release.pods()["gateway"]["spec"]
    assert spec.get("imagePullSecrets") == gateway.get("imagePullSecrets")
    (container,) = spec["containers"]
    for bound in ("requests", "limits"):
        assert set(container["resources"][bound]) == {"cpu", "memory"}


@every_cluster
def test_every_mount_has_its_volume_and_every_reference_its_object(values: Path) -> None:
    release = render(values)
    made = {(item["kind"], item["metadata"]["name"]) for item in release.objects}
    config = release.one("RayCluster")["spec"]
    for component, pod in release.pods().items():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for name, container in containers(pod).items():
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= set(volumes), f"{component}/{name}"
        for kind, name in references(pod):
            assert (kind, name) in made or name in given(values), f"{component}: there is no {kind} {name}"
    assert ("Secret", config["authOptions"]["secretName"]) in made or values.name == "production-values.yaml"


def references(pod: Object) -> set[tuple[str, str]]:
    """Secrets, ConfigMaps, accounts and claims that a pod cannot start without."""
    found = {("ServiceAccount", pod["spec"]["serviceAccountName"])}
    for volume in pod["spec"]["volumes"]:
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            if "configMap" in source:
                found.add(("ConfigMap", source["configMap"]["name"]))
            if "secret" in source:
                found.add(("Secret", source["secret"].get("secretName") or source["secret"]["name"]))
            if "persistentVolumeClaim" in source:
                found.add(("PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"]))
    for container in containers(pod).values():
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                found.add(("Secret", reference["name"]))
    return found


def given(values: Path) -> set[str]:
    """Objects that must exist before the installation, or that cert-manager makes."""
    text = yaml.safe_load(values.read_text())
    security = text.get("security", {})
    names = {part["existingSecret"] for part in security.values() if "existingSecret" in part}
    return names | {text["model"].get("existingClaim", ""), "demo-baton-tls" if security else ""}


PARTS = {"gateway": "gateway", "head": "rayHead", "prefill": "prefill", "decode": "decode"}


OF_HUB: Object = {
    "model": {
        "path": "acme/tiny",
        "existingClaim": "mine",
        "hub": {"endpoint": "https://hub.example.com", "tokenSecret": {"name": "mine"}},
    }
}


def test_no_variable_that_the_chart_sets_is_set_twice() -> None:
    own = {
        variable["name"]: PARTS[component]
        for component, pod in render(OF_HUB).pods().items()
        for container in containers(pod).values()
        for variable in container.get("env", [])
    }
    assert {"RAY_AUTH_TOKEN", "POD_IP", "BATON_CLUSTER_SECRET", "HF_TOKEN"} <= set(own)
    for name, part in own.items():
        said = refusal(OF_HUB | {part: {"extraEnv": [{"name": name, "value": "mine"}]}})
        assert f"{part}.extraEnv: the chart sets {name} by itself; remove it" in said


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"path": "/models/tiny.Q4_K_M.gguf", "existingClaim": "weights"}, "tiny.Q4_K_M"),
        ({"path": "/opt/mine", "inImage": True}, "mine"),
        ({"path": "acme/tiny:tiny.Q4_K_M.gguf"}, "acme/tiny:tiny.Q4_K_M.gguf"),
    ],
    ids=["GGUF file", "folder", "GGUF file of the Hub"],
)
def test_the_notes_ask_for_the_model_by_the_name_that_gateways_serve(values: Object, name: str) -> None:
    assert f'"model": "{name}"' in render({"model": values}).notes


def test_the_notes_say_that_an_upgrade_forgets_what_is_only_on_the_command_line() -> None:
    assert "forgets what --set gave" in render().notes
    assert "forgets what --set gave" not in render({"security": {"apiKeys": {"adminSha256": "a" * 64}}}).notes


def test_the_notes_say_what_to_type_next() -> None:
    plain = render({"security": {"tls": {"mode": "none"}}}).notes
    assert "curl http://localhost:8000/v1/chat/completions" in plain
    secured = render().notes
    assert "curl --cacert ca.pem https://localhost:8000/v1/chat/completions" in secured
    assert "--force-conflicts" not in secured
    assert "--force-conflicts" in render({"autoscaling": {"workers": {"enabled": True}}}).notes
    assert "KubeRay operator" in secured, "helm knows no ray.io/v1 here, so a warning is due"
