"""deploy/kubernetes: objects of gateways and KServe are valid, and their arguments start a server.

Schemas are strict and name what the examples use: fields as the projects' custom resource
definitions have them (inference.networking.k8s.io, serving.kserve.io, gateway.networking.k8s.io).
"""

import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from loraplex.adapters.common.meters import Meters
from loraplex.launcher import config
from loraplex.launcher.command_line import Parser, add_options, flags_of
from loraplex.launcher.moved_line import move
from loraplex.launcher.serving.plan import ServePlan, plan
from loraplex.router.build import build_service
from loraplex.router.config import RouterConfig
from loraplex.router.operations.compat_metrics import COMPAT_PREFIX, CompatMetrics
from tests.deploy.chart import ROOT, Object
from tests.deploy.operator_schemas import COUNT, LABELS, NAME, TEXT, listing, table
from tests.router.serving import FakeHub

FOLDER = ROOT / "deploy/kubernetes"
GUIDE = ROOT / "docs/guides/gateways-and-kserve.md"
KUBERNETES = kubernetes_validate.latest_version()
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
EMPTY = table({})
BASE = "meta-llama/Llama-3.1-8B-Instruct"

Schema = dict[str, Any]


def thing(spec: Schema) -> Schema:
    return table(
        {"apiVersion": TEXT, "kind": TEXT, "metadata": table({"name": NAME}), "spec": spec}
    )


# Pods are judged as Kubernetes' own, apart.
CONTAINERS = listing({"type": "object", "required": ["name", "image"]})
SCHEMAS: dict[tuple[str, str], Schema] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): thing(
        table(
            {
                "selector": table({"matchLabels": LABELS}),
                "targetPorts": {**listing(table({"number": PORT})), "maxItems": 8},
                "endpointPickerRef": table(
                    {"name": NAME, "port": table({"number": PORT})},
                    {
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                        "kind": TEXT,
                        "group": TEXT,
                    },
                ),
            }
        )
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): thing(
        table(
            {
                "parentRefs": listing(table({"name": NAME})),
                "rules": listing(
                    table(
                        {
                            "matches": listing(
                                table({"path": table({"type": TEXT, "value": TEXT})})
                            ),
                            "backendRefs": listing(
                                table({"group": TEXT, "kind": TEXT, "name": NAME})
                            ),
                        },
                        {"timeouts": table({"request": TEXT})},
                    )
                ),
            }
        )
    ),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): thing(
        table(
            {
                "supportedModelFormats": listing(
                    table({"name": TEXT}, {"version": TEXT, "autoSelect": {"type": "boolean"}})
                ),
                "containers": CONTAINERS,
            },
            {"multiModel": {"type": "boolean"}, "annotations": LABELS},
        )
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): thing(
        table(
            {
                "predictor": table(
                    {
                        "model": table(
                            {"modelFormat": table({"name": TEXT}), "runtime": NAME},
                            {"storageUri": TEXT, "args": listing(TEXT)},
                        )
                    },
                    {"minReplicas": COUNT, "maxReplicas": COUNT},
                )
            }
        )
    ),
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"): thing(
        table(
            {
                "model": table({"name": TEXT, "uri": TEXT}),
                "template": table({"containers": CONTAINERS}),
                "router": table({}, {"gateway": EMPTY, "route": EMPTY, "scheduler": EMPTY}),
            },
            {"replicas": COUNT},
        )
    ),
    ("llm-d.ai/v1alpha1", "EndpointPickerConfig"): table(
        {
            "apiVersion": TEXT,
            "kind": TEXT,
            "plugins": listing(table({"type": TEXT}, {"name": TEXT, "parameters": {}})),
            "schedulingProfiles": listing(
                table(
                    {
                        "name": TEXT,
                        "plugins": listing(table({"pluginRef": TEXT}, {"weight": COUNT})),
                    }
                )
            ),
        }
    ),
}
OWN = {("apps/v1", "Deployment"), ("v1", "ConfigMap")}
# The metrics that llm-d's picker reads of a vLLM server, by the scorers that need them.
READ = {
    "queue-scorer": ("num_requests_waiting", "num_requests_running"),
    "kv-cache-utilization-scorer": ("kv_cache_usage_perc", "cache_config_info"),
    "lora-affinity-scorer": ("lora_requests_info",),
}


def things(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def of_kind(name: str, kind: str) -> Object:
    (found,) = (one for one in things(name) if one["kind"] == kind)
    return found


def containers(thing: Object) -> list[Object]:
    spec = thing.get("spec", {})
    pod = spec.get("template", spec)
    found: list[Object] = pod.get("spec", pod).get("containers", [])
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_objects_are_valid(path: Any) -> None:
    for one in yaml.safe_load_all(path.read_text()):
        kind = one["apiVersion"], one["kind"]
        if kind in OWN:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
        else:
            jsonschema.validate(one, SCHEMAS[kind])
        for container in containers(one):
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p"},
                "spec": {"containers": [container]},
            }
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def started(words: list[str], environ: dict[str, str]) -> ServePlan:
    """The plan of a container's command line, as `loraplex serve` makes it."""
    assert words[0] == "serve"
    options = config.serve_options()
    moved = move(words[1:], flags_of(options))
    parser = Parser()
    parser.add_argument("model", nargs="?")
    add_options(parser, options)
    given = parser.parse_args(moved.words)
    return plan(config.resolve(options, given, environ, optional=("model",)))


def environment(container: Object) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}


def test_pods_of_a_pool_start() -> None:
    (container,) = containers(of_kind("inference-pool", "Deployment"))
    found = started(container["args"], environment(container))
    pool = of_kind("inference-pool", "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": found.router.port}]
    assert found.router.metrics_compat
    assert found.router.host == "0.0.0.0"
    assert len(found.aliases) == 2
    labels = of_kind("inference-pool", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()


def test_what_the_picker_weighs_is_measured() -> None:
    (text,) = of_kind("inference-pool", "ConfigMap")["data"].values()
    picker = yaml.safe_load(text)
    jsonschema.validate(picker, SCHEMAS["llm-d.ai/v1alpha1", "EndpointPickerConfig"])
    plugins = {plugin["type"] for plugin in picker["plugins"]}
    (profile,) = picker["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} < plugins
    service = build_service(RouterConfig(), CollectorRegistry(), FakeHub())
    meters = Meters(CollectorRegistry(), COMPAT_PREFIX)
    compat = CompatMetrics(service.bases, service.catalog.rules.aliases, service.admin.use)
    compat.declare(meters, service.metrics)
    declared = {metric.name for metric in meters.declared}
    read = [name for plugin in READ.keys() & plugins for name in READ[plugin]]
    assert {f"vllm:{name}" for name in read} <= declared
    assert READ.keys() <= plugins


def test_arguments_of_kserve_start_a_server() -> None:
    (container,) = containers(of_kind("kserve", "ServingRuntime"))
    service = of_kind("kserve", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    words = [*container["command"][1:], *container["args"], *model["args"]]
    words = [word.replace("{{.Name}}", service["metadata"]["name"]) for word in words]
    found = started(words, environment(container))
    assert found.worker.model == "/mnt/models"
    assert found.worker.model_names == ("llama", BASE)
    assert found.router.adapters == (
        "sql=hub:acme/sql-lora@main",
        "support=hub:acme/support-lora@v2",
    )
    assert (found.router.host, found.router.port, found.router.auth) == ("0.0.0.0", 8080, "none")
    assert {port["containerPort"] for port in container["ports"]} == {found.router.port}


def test_arguments_of_an_llm_inference_service_start_a_server() -> None:
    service = of_kind("llm-inference-service", "LLMInferenceService")
    (container,) = containers(service)
    words = [*container["command"][1:], *container["args"]]
    words = [
        word.replace("{{ .Spec.Model.Name }}", service["spec"]["model"]["name"]) for word in words
    ]
    found = started(words, environment(container))
    assert (found.worker.model, found.worker.model_names) == ("/mnt/models", ("llama", BASE))
    assert found.router.tls_cert is not None
    assert found.router.port == 8000


def test_the_guide_names_every_example() -> None:
    named = set(re.findall(r"deploy/kubernetes/([\w-]+\.yaml)", GUIDE.read_text()))
    assert named == {path.name for path in FOLDER.glob("*.yaml")}
