"""The Helm chart: what it renders is valid, closed and complete, and what is missing is refused."""

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from tests.deploy.tools import DEPLOY, checker, load, run

CHART = DEPLOY / "helm" / "packhouse"
NEEDED = {
    "database": {"secret": "packhouse-database"},
    "store": {"location": "s3://bucket/prefix", "credentialsSecret": "packhouse-store"},
    "sources": {"volume": {"persistentVolumeClaim": {"claimName": "corpora"}}},
    "ray": {"tokenSecret": "packhouse-ray"},
}
ALL = NEEDED | {
    "monitoring": {"serviceMonitor": True, "tokenSecret": "packhouse-metrics", "rules": True, "dashboard": True},
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"team": "training"}}}]},
    "service": {"environment": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}]},
}

Objects = dict[tuple[str, str], dict[str, Any]]


def render(values: dict[str, Any], name: str = "demo") -> Objects:
    command = [checker("helm"), "template", name, str(CHART), "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.fixture(scope="module")
def objects() -> Objects:
    return render(ALL)


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pod templates: of the service, of Ray's head and of its workers."""
    cluster = objects["RayCluster", "demo"]["spec"]
    yield "service", objects["Deployment", "demo"]["spec"]["template"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


@pytest.mark.parametrize("values", [NEEDED, ALL], ids=["least", "all"])
def test_helm_finds_nothing(values: dict[str, Any], tmp_path: Any) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values))
    run(checker("helm"), "lint", "--strict", str(CHART), "--values", str(tmp_path / "values.json"))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_what_it_renders(objects: Objects, version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate: make deploy-tools")
    foreign = {"RayCluster", "ServiceMonitor", "PrometheusRule"}
    for (kind, _), one in objects.items():
        if kind not in foreign:
            kubernetes.validate(one, version, strict=True)
    for name, template in pods(objects):  # Ray's pods are checked as what KubeRay makes of them
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        kubernetes.validate(pod, version, strict=True)
    broken = objects["Service", "demo"] | {"spec": {"ports": [{"port": "http"}]}}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(broken, version, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("database.secret", ""),
        ("ray.tokenSecret", ""),
        ("store.location", "bucket"),
        ("service.replicas", 0),
        ("service.replica", 3),
        ("image.service", "packhouse/service"),
    ],
)
def test_values_that_cannot_work_are_refused(path: str, value: Any) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = json.loads(json.dumps(load("helm/packhouse/values.yaml")))
    for part in ("database", "store", "ray"):
        values[part] |= NEEDED[part]
    jsonschema.validate(values, schema)
    section, name = path.split(".")
    values[section][name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)


def test_pods_have_no_rights_and_know_their_size(objects: Objects) -> None:
    for name, template in pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (name == "head")  # where the autoscaler sits
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {"livenessProbe", "readinessProbe"} <= set(container)


def test_the_probes_ask_routes_that_are_there(objects: Objects) -> None:
    (container,) = objects["Deployment", "demo"]["spec"]["template"]["spec"]["containers"]
    asked = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked == {"startupProbe": "/livez", "livenessProbe": "/readyz", "readinessProbe": "/readyz"}
    alive, ready = container["livenessProbe"], container["readinessProbe"]
    assert alive["failureThreshold"] * alive["periodSeconds"] >= 300 > 3 * ready["periodSeconds"]
    assert objects["Deployment", "demo"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 20


def allows(rule: dict[str, Any], labels: dict[str, str], port: int) -> bool:
    """Whether an ingress rule lets pods of this namespace with ``labels`` reach ``port``."""
    ports = rule.get("ports")
    selectors = [one["podSelector"].get("matchLabels", {}) for one in rule["from"] if "podSelector" in one]
    return any(wanted.items() <= labels.items() for wanted in selectors) and (
        ports is None or port in [one["port"] for one in ports]
    )


@pytest.mark.parametrize(
    ("who", "port", "reached"),
    [("ray", 6379, True), ("service", 10001, True), ("service", 6379, False), ("other", 10001, False)],
)
def test_rays_ports_are_private(objects: Objects, who: str, port: int, reached: bool) -> None:
    labels = {
        "ray": {"ray.io/cluster": "demo"},
        "service": objects["Deployment", "demo"]["spec"]["template"]["metadata"]["labels"],
        "other": {"app.kubernetes.io/instance": "demo"},
    }
    policy = objects["NetworkPolicy", "demo-ray"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": "demo"}
    assert any(allows(rule, labels[who], port) for rule in policy["ingress"]) is reached


def test_ray_asks_for_a_token_and_the_service_has_it(objects: Objects) -> None:
    auth = objects["RayCluster", "demo"]["spec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "packhouse-ray"}
    pod = objects["Deployment", "demo"]["spec"]["template"]["spec"]
    environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert environment["PACKHOUSE_RAY_ADDRESS"] == "ray://demo-head-svc:10001"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray/auth_token"
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert secrets[mounts["/run/secrets/ray"]] == "packhouse-ray"
    assert secrets[mounts["/run/secrets/database"]] == "packhouse-database"
    assert ("Secret", "demo") not in objects


def test_everyone_who_reads_sources_and_store_sees_them(objects: Objects) -> None:
    for name, template in pods(objects):
        (container,) = template["spec"]["containers"]
        mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
        assert mounts["/data"]["readOnly"], name
        environment = {one["name"]: one.get("value", "") for one in container["env"]}
        assert environment["AWS_SHARED_CREDENTIALS_FILE"] == "/run/secrets/store/credentials"
        assert "/run/secrets/store" in mounts


def test_workers_come_and_go_with_the_work(objects: Objects) -> None:
    spec = objects["RayCluster", "demo"]["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"]
    assert (group["minReplicas"], group["maxReplicas"], group["rayStartParams"]["num-cpus"]) == (1, 10, "4")
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize(("replicas", "budget"), [(1, False), (3, True)])
def test_a_budget_for_disruptions_where_one_may_go(replicas: int, budget: bool) -> None:
    objects = render(NEEDED | {"service": {"replicas": replicas}})
    assert (("PodDisruptionBudget", "demo") in objects) is budget
    assert not {kind for kind, _ in objects} & {"ServiceMonitor", "PrometheusRule", "ConfigMap"}


def test_rules_and_dashboard_arrive_whole(objects: Objects) -> None:
    assert objects["PrometheusRule", "demo"]["spec"] == load("prometheus/rules.yaml")
    dashboard = objects["ConfigMap", "demo-dashboard"]["data"]["packhouse.json"]
    assert json.loads(dashboard) == json.loads((DEPLOY / "grafana" / "packhouse.json").read_text())


def test_long_names_leave_room_for_rays(render_name: Callable[[str], Objects]) -> None:
    objects = render_name("a" * 53)
    assert all(len(name) <= 50 for _, name in objects)


@pytest.fixture
def render_name() -> Callable[[str], Objects]:
    return lambda name: render(NEEDED, name)
