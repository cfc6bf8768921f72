"""The chart renders for every kind of values, and what comes out is valid Kubernetes."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from deploy.helm import options_schema
from loraplex.launcher.config import ROUTER_OPTIONS, WORKER_OPTIONS
from loraplex.launcher.options import Option
from loraplex.router.build import build_service
from loraplex.router.config import RouterConfig
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.adapters_file import read
from loraplex.router.policy.rollout import Guards
from loraplex.router.routes.app import build_app
from tests.deploy.chart import (
    CASES,
    CHART,
    Object,
    case,
    merged,
    objects,
    objects_of,
    of_kind,
    pods,
    render,
    texts,
)
from tests.deploy.operator_schemas import SCHEMAS
from tests.router.serving import FakeHub

# The oldest that Chart.yaml admits, and the newest known to the validator.
KUBERNETES = ("1.27", "1.30", kubernetes_validate.latest_version())
NEEDED: Object = {
    "model": {"id": "org/model"},
    "images": {"router": {"repository": "r"}, "worker": {"repository": "w"}},
    "secrets": {"adminKey": {"name": "admin"}},
}

# Names that YAML would read as numbers, truths or nothing, unless they are quoted.
ODD: Object = {
    "pools": [{"name": "no"}, {"name": "on"}, {"name": "null"}],
    "worker": {"podLabels": {"odd": "true"}, "hubCacheClaim": "7"},
    "router": {"tlsSecretName": "0123", "filesClaim": "12"},
    "secrets": {
        "workers": {"name": "123", "key": "1"},
        "adminKey": {"name": "1e3", "key": "no"},
        "redis": {"key": "on"},
        "s3": {"name": "5", "accessKeyId": "1", "secretAccessKey": "2", "sessionToken": "3"},
    },
    "redis": {"mode": "bundled"},
    "serviceAccounts": {"router": {"name": "123"}, "worker": {"name": "0"}},
    "ingress": {"enabled": True, "className": "on", "hosts": ["h"], "tlsSecretName": "0123"},
    "monitoring": {"dashboards": {"enabled": True, "label": "on"}},
}

every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_lint_finds_nothing(name: str) -> None:
    report = helm.lint(CHART, case(name), strict=True)
    assert not report["errors"]
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def test_the_defaults_lint_and_need_three_answers() -> None:
    assert not helm.lint(CHART, {})["errors"]
    render(NEEDED)


@every_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_are_valid(name: str, version: str) -> None:
    for thing in objects(name):
        schema = SCHEMAS.get(thing["kind"])
        if schema is not None:
            jsonschema.validate(thing, schema)
        else:
            kubernetes_validate.validate(thing, version, strict=True)


def scalars(value: Any) -> Iterator[Any]:
    """Values and keys, of everything below."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for below in value.values() if isinstance(value, dict) else value:
            yield from scalars(below)
    else:
        yield value


def test_names_that_yaml_would_read_otherwise_stay_names() -> None:
    found = objects_of(render(merged(NEEDED, ODD)))
    for thing in found:
        kubernetes_validate.validate(thing, KUBERNETES[-1], strict=True)
        assert None not in scalars(thing)
    told = {value for thing in found for value in scalars(thing) if isinstance(value, str)}
    assert {"123", "1e3", "0123", "0", "1", "2", "3", "5", "7", "no", "on"} <= told
    pools = [
        thing["spec"]["template"]["metadata"]["labels"].get("loraplex/pool")
        for thing in of_kind(found, "StatefulSet")
    ]
    assert {"no", "on", "null"} <= set(pools)
    accounts = {thing["metadata"]["name"] for thing in of_kind(found, "ServiceAccount")}
    assert accounts == {spec.get("serviceAccountName") for _, spec in pods(found)} - {None}
    (ingress,) = of_kind(found, "Ingress")
    assert ingress["spec"]["ingressClassName"] == "on"
    assert [tls["secretName"] for tls in ingress["spec"]["tls"]] == ["0123"]


def test_an_operator_has_the_last_word_on_the_ingress() -> None:
    key, kept = (f"nginx.ingress.kubernetes.io/proxy-{name}" for name in ("body-size", "buffering"))
    change = {"ingress": {"enabled": True, "hosts": ["h"], "annotations": {key: "8m"}}}
    rendered = render(merged(NEEDED, change))
    (ingress,) = of_kind(objects_of(rendered), "Ingress")
    assert ingress["metadata"]["annotations"][key] == "8m"
    assert ingress["metadata"]["annotations"][kept] == "off"
    assert rendered["loraplex/templates/ingress.yaml"].count(key) == 1


def paths_of(thing: Object) -> tuple[set[str], set[str]]:
    """Beginnings that an Ingress or HTTPRoute passes on, and whole paths."""
    found: dict[str, set[str]] = {"Prefix": set(), "PathPrefix": set(), "Exact": set()}
    for rule in thing["spec"]["rules"]:
        for path in rule.get("http", {}).get("paths", ()):
            found[path["pathType"]].add(path["path"])
        for match in rule.get("matches", ()):
            found[match["path"]["type"]].add(match["path"]["value"])
    return found["Prefix"] | found["PathPrefix"], found["Exact"]


def test_what_is_in_front_passes_every_route_but_metrics() -> None:
    registry = CollectorRegistry()
    service = build_service(RouterConfig(workers=("ws://127.0.0.1:9",)), registry, FakeHub())
    build_app(service)
    # Each route of the table is a label of its counter from the start.
    counted = generate_latest(registry).decode()
    routes = set(re.findall(r'^loraplex_requests_total\{.*route="(/[^"]*)"', counted, re.M))
    assert {"/", "/metrics", "/v1/files/{id}", "/console/{file}", "/embed"} <= routes
    expected = {f"/{route.split('/')[1]}" for route in routes} - {"/", "/metrics"}
    for kind in ("Ingress", "HTTPRoute"):
        (thing,) = of_kind(objects("fleet"), kind)
        assert paths_of(thing) == (expected, {"/"}), "bring routes.yaml up to date"
    change = {"ingress": {"enabled": True, "hosts": ["h"], "paths": ["/v1"]}}
    (ingress,) = of_kind(objects_of(render(merged(NEEDED, change))), "Ingress")
    assert paths_of(ingress) == ({"/v1"}, {"/"})


def test_pods_take_further_containers_and_variables() -> None:
    more = {
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "initContainers": [{"name": "wait", "image": "busybox:1", "command": ["true"]}],
        "extraContainers": [{"name": "shipper", "image": "shipper:1"}],
    }
    change = {
        "router": more,
        "worker": more,
        "images": {"pullSecrets": [{"name": "registry"}]},
        "pools": [{"name": "one"}, {"name": "two", "extraContainers": []}],
    }
    found = objects_of(render(merged(NEEDED, change)))
    seen = []
    for thing in of_kind(found, "Deployment") + of_kind(found, "StatefulSet"):
        kubernetes_validate.validate(thing, KUBERNETES[-1], strict=True)
        spec = thing["spec"]["template"]["spec"]
        assert [one["name"] for one in spec["initContainers"]] == ["wait"]
        assert spec["containers"][0]["envFrom"] == more["envFrom"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        seen.append([one["name"] for one in spec["containers"]])
    assert sorted(seen) == [["router", "shipper"], ["worker"], ["worker", "shipper"]]


def test_alerts_name_their_runbooks_where_people_read_them() -> None:
    rule = {"enabled": True, "runbooks": "https://wiki.example.com/lora/"}
    rendered = render(merged(NEEDED, {"monitoring": {"prometheusRule": rule}}))
    (found,) = of_kind(objects_of(rendered), "PrometheusRule")
    urls = {
        one["annotations"]["runbook_url"]
        for group in found["spec"]["groups"]
        for one in group["rules"]
        if "alert" in one
    }
    pages = {path.name for path in (CHART.parents[2] / "docs/operations/runbooks").iterdir()}
    assert urls == {f"https://wiki.example.com/lora/{page}" for page in pages}


def test_the_readme_names_every_value() -> None:
    written = (CHART / "README.md").read_text()
    rows = "".join(line.split("|")[1] for line in written.splitlines() if line.startswith("| `"))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(re.findall(r"`(\w+)`", rows)) == set(values)


@pytest.mark.parametrize("component", ["router", "worker"])
def test_labels_of_pods_cannot_hide_them_from_their_selectors(component: str) -> None:
    lost = dict.fromkeys(("app.kubernetes.io/component", "loraplex/pool", "team"), "x")
    found = objects_of(render(merged(NEEDED, {component: {"podLabels": lost}})))
    (owner,) = of_kind(found, {"router": "Deployment", "worker": "StatefulSet"}[component])
    labels = owner["spec"]["template"]["metadata"]["labels"]
    assert owner["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "x"


def test_the_validators_can_fail() -> None:
    (budget, *_) = of_kind(objects("fleet"), "PodDisruptionBudget")
    bad = merged(budget, {"spec": {"maxUnavailible": 1}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, KUBERNETES[-1], strict=True)
    (monitor,) = of_kind(objects("fleet"), "ServiceMonitor")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            merged(monitor, {"spec": {"samplelimit": 1}}), SCHEMAS["ServiceMonitor"]
        )


@every_case
def test_names_are_unique_and_fit(name: str) -> None:
    found = [(o["kind"], o["metadata"]["name"]) for o in objects(name)]
    assert len(found) == len(set(found))
    for thing in of_kind(objects(name), "StatefulSet"):
        # With "-" and ten letters of a hash it is a label's value, with "-<n>" a host's name.
        assert len(thing["metadata"]["name"]) + 11 <= 63


def test_long_names_still_fit() -> None:
    values = merged(NEEDED, {"fullnameOverride": "x" * 80, "pools": [{"name": "p" * 15}]})
    for thing in of_kind(objects_of(render(values)), "StatefulSet", "Service", "Deployment"):
        assert len(thing["metadata"]["name"]) + 11 <= 63


def test_objects_of_other_projects_come_only_when_enabled() -> None:
    kinds = {thing["kind"] for thing in objects_of(render(NEEDED))}
    assert not kinds & SCHEMAS.keys()
    assert {"NetworkPolicy", "PodDisruptionBudget", "StatefulSet", "Deployment"} <= kinds


def test_selectors_find_their_pods_and_no_others() -> None:
    found = objects("fleet")
    labels = {
        thing["metadata"]["name"]: thing["spec"]["template"]["metadata"]["labels"]
        for thing in of_kind(found, "Deployment", "StatefulSet")
    }
    for thing in of_kind(found, "Deployment", "StatefulSet", "PodDisruptionBudget"):
        wanted = thing["spec"]["selector"]["matchLabels"].items()
        matching = [name for name, given in labels.items() if wanted <= given.items()]
        assert matching == [thing["metadata"]["name"]]


def test_routers_know_the_address_of_every_worker() -> None:
    """Pools that grow up to maxReplicas keep their routers."""
    found = objects("fleet")
    (router,) = of_kind(found, "Deployment")
    args = router["spec"]["template"]["spec"]["containers"][0]["args"]
    (service,) = [o for o in of_kind(found, "Service") if o["spec"].get("clusterIP") == "None"]
    domain = f"{service['metadata']['name']}.serving.svc.cluster.local:8090"
    expected = []
    for thing in of_kind(found, "StatefulSet"):
        assert thing["spec"]["serviceName"] == service["metadata"]["name"]
        pool = thing["spec"]["template"]["metadata"]["labels"]["loraplex/pool"]
        most = {"h200": 16, "h100-spot": 2}[pool]
        name = thing["metadata"]["name"]
        expected += [f"--worker=ws://{name}-{number}.{domain}" for number in range(most)]
    assert [arg for arg in args if arg.startswith("--worker=")] == expected


def test_adapters_are_written_as_the_router_reads_them() -> None:
    (config,) = [o for o in of_kind(objects("fleet"), "ConfigMap") if "adapters.yaml" in o["data"]]
    contents = read(config["data"]["adapters.yaml"].encode(), "hub")
    assert not contents.errors
    declared = {
        OwnedName(entry["name"], entry.get("tenant", "")): entry.get("pin", False)
        for entry in case("fleet")["adapters"]
    }
    assert {name: wanted.pin for name, wanted in contents.wanted.items()} == declared
    assert OwnedName("support", "umbrella") in declared
    rollout = contents.wanted[OwnedName("support")].rollout
    assert rollout is not None
    assert [weight for _, weight in rollout.versions] == [5]
    assert rollout.guards == Guards(min_requests=200, max_latency_ratio=1.5)


def test_declaring_adapters_replaces_no_pod() -> None:
    more = merged(NEEDED, {"adapters": [{"name": "new", "ref": "hub:a/b"}]})
    before, after = (of_kind(objects_of(render(v)), "Deployment") for v in (NEEDED, more))
    assert before == after


def test_a_new_release_of_the_chart_alone_replaces_no_worker(tmp_path: Path) -> None:
    copy = tmp_path / "loraplex"
    shutil.copytree(CHART, copy)
    text = (CHART / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(re.sub(r"^version: .*", "version: 9.9.9", text, flags=re.M))
    before, after = (of_kind(objects_of(render(NEEDED, c)), "StatefulSet") for c in (CHART, copy))
    assert before != after
    assert [o["spec"] for o in before] == [o["spec"] for o in after]


def test_the_made_secret_is_long_and_kept() -> None:
    (secret,) = of_kind(objects("small"), "Secret")
    (value,) = secret["data"].values()
    assert len(base64.b64decode(value)) >= 32
    # Drawn anew without a cluster that could be asked for the one before.
    assert of_kind(objects_of(render(case("small"))), "Secret") != [secret]
    assert "lookup" in (CHART / "templates/secrets.yaml").read_text()
    assert not of_kind(objects("fleet"), "Secret"), "a named one is not made"


def test_dashboards_and_rules_are_the_files() -> None:
    boards = [
        o for o in of_kind(objects("fleet"), "ConfigMap") if "dashboard" in str(o["metadata"])
    ]
    files = {path.name: path for path in (CHART / "dashboards").glob("*.json")}
    carried = {name: text for board in boards for name, text in board["data"].items()}
    assert carried.keys() == files.keys()
    for name, path in files.items():
        assert json.loads(carried[name]) == json.loads(path.read_text())
        assert len(carried[name]) < 900_000, "a ConfigMap holds 1 MiB"
    made = [o["spec"] for o in of_kind(objects("fleet"), "PrometheusRule")]
    (written,) = [
        yaml.safe_load(path.read_text()) for path in sorted((CHART / "rules").glob("*.yaml"))
    ]
    adapted = set()
    for group, given in zip(made[0]["groups"], written["groups"], strict=True):
        for rule, as_written in zip(group["rules"], given["rules"], strict=True):
            if rule != as_written:
                adapted.add(rule["alert"])
                assert rule | {"expr": as_written["expr"]} == as_written
    assert adapted == {"LoraplexNoReadyWorker", "LoraplexWorkerDisconnected"}
    assert len(made) == 1


def test_the_notes_have_a_request_that_can_be_pasted() -> None:
    notes = texts("fleet")["loraplex/templates/NOTES.txt"]
    curl = re.search(r"curl (\S+) -H '([^']+)' .*-d '([^']+)'", notes)
    assert curl is not None
    assert curl[1] == "https://lora.example.com/generate"
    assert json.loads(curl[3])["parameters"]["adapter_id"] == "sql"
    assert "Authorization: Bearer $KEY" in curl[0]
    assert "Authorization" not in texts("small")["loraplex/templates/NOTES.txt"]


def test_the_schema_knows_the_options_of_today() -> None:
    assert options_schema.SCHEMA.read_text() == options_schema.render(), (
        "run: .venv/bin/python -m deploy.helm.options_schema"
    )
    assert options_schema.GONE.read_text() == options_schema.gone()


def test_values_in_place_of_options_are_the_charts() -> None:
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    for taken in options_schema.SET_BY_CHART.values():
        for place in filter(None, taken.values()):
            found: object = values
            for key in place.split("."):
                assert isinstance(found, dict), place
                assert key in found, place
                found = found[key]


@pytest.mark.parametrize(
    ("command", "options"), [("router", ROUTER_OPTIONS), ("worker", WORKER_OPTIONS)]
)
def test_what_the_chart_keeps_to_itself_it_sets(command: str, options: tuple[Option, ...]) -> None:
    given = {
        arg.partition("=")[0].removeprefix("--")
        for name in CASES
        for _, spec in pods(objects(name))
        for container in spec["containers"]
        if container["name"] == command
        for arg in container.get("args", ())
    }
    secrets = {f"{option.flag}-file" for option in options if option.is_secret}
    # Adapters are declared in a file, the model is no flag, more routers are more pods, a service
    # needs a port, and workers do not enlist themselves.
    not_given = {"adapter", "model", "metrics-port", "router-processes", "uds"}
    if command == "worker":
        not_given |= {"advertise", "redis", "redis-prefix", "redis-password-file"}
    unset = options_schema.SET_BY_CHART[f"{command}Options"].keys() | secrets
    assert unset - given <= not_given


def test_it_can_be_packaged(tmp_path: Path) -> None:
    packed = helm.package(CHART, destination=tmp_path)
    with helm.Chart.load(packed) as chart:
        chart.validate_schema(NEEDED)
        with pytest.raises(helm.HelmError, match="nope"):
            chart.validate_schema(NEEDED | {"nope": 1})


def test_each_base_has_workers_and_an_autoscaler_of_its_own() -> None:
    found = objects("several-bases")
    (deployment,) = of_kind(found, "Deployment")
    router = deployment["spec"]["template"]["spec"]["containers"][0]
    bases = ["meta-llama/Llama-3.1-8B-Instruct", "small"]
    given = [text.removeprefix("--base=") for text in router["args"] if "--base=" in text]
    assert given == bases
    workers = {
        thing["spec"]["template"]["metadata"]["labels"]["loraplex/pool"]: thing["spec"]["template"]
        for thing in of_kind(found, "StatefulSet")
    }
    args = {pool: pod["spec"]["containers"][0]["args"] for pool, pod in workers.items()}
    assert args["main"][1] == bases[0]
    assert args["small"][1:4] == ["Qwen/Qwen3-0.6B", "--revision=main", "--model-name=small"]
    (scaled,) = of_kind(found, "ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 4
    assert all('{base="small",namespace=' in query for query in queries)
    assert any("loraplex_base_wanted" in query for query in queries)


def test_pools_of_one_base_share_its_demand() -> None:
    """All of them see the same requests: each takes its part, by its size."""
    scaling = {"kind": "keda", "minReplicas": 1, "requestsPerWorker": 12, "queuedPerWorker": 4}
    pools = [
        {"name": "large", "autoscaling": {**scaling, "maxReplicas": 6}},
        {"name": "small", "autoscaling": {**scaling, "maxReplicas": 2}},
        {"name": "fixed", "replicas": 4, "autoscaling": {"kind": "none"}},
    ]
    found = objects_of(render(merged(case("scale-to-zero"), {"pools": pools})))
    large, small = (
        [trigger["metadata"]["threshold"] for trigger in scaler["spec"]["triggers"]]
        for scaler in of_kind(found, "ScaledObject")
    )
    assert sorted({*large}) == ["24", "8"]  # of 12 workers it may run six
    assert sorted({*small}) == ["24", "72"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bases": [{"name": "b", "id": "x"}]}, '"b" has no pool'),
        ({"pools": [{"name": "a", "base": "b"}]}, 'base "b" is none of bases'),
        (
            {"bases": [{"name": "org/model", "id": "x"}], "pools": [{"name": "a"}]},
            "a name is there twice",
        ),
    ],
)
def test_bases_and_pools_belong_together(change: Object, said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(merged(NEEDED, change))
