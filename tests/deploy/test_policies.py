"""What every pod must be: hardened, bounded, free of plain secrets, drained in time."""

import re
from collections.abc import Iterator

import pytest

from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.config import ROUTER_OPTIONS, WORKER_OPTIONS, check_variables, resolve
from loraplex.launcher.options import PREFIX, build
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig
from tests.deploy.chart import (
    CASES,
    CHART,
    Object,
    merged,
    objects,
    objects_of,
    of_kind,
    pods,
    render,
)
from tests.deploy.chart import case as values_of

CREDENTIALS = "/etc/loraplex/credentials/"
LIVE, READY = "/health/live", "/health/ready"
SECRETS = {o.flag for o in (*ROUTER_OPTIONS, *WORKER_OPTIONS) if o.is_secret}
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)


def every_pod() -> list[tuple[str, str]]:
    return [(case, name) for case in CASES for name, _ in pods(objects(case))]


def every_container() -> list[tuple[str, str, str]]:
    return [
        (case, name, container["name"])
        for case in CASES
        for name, spec in pods(objects(case))
        for container in spec["containers"]
    ]


def pod_of(case: str, name: str) -> Object:
    return next(spec for found, spec in pods(objects(case)) if found == name)


def container_of(case: str, name: str, container: str) -> Object:
    found: Object = next(c for c in pod_of(case, name)["containers"] if c["name"] == container)
    return found


def of_loraplex(component: str) -> Iterator[tuple[str, Object, Object]]:
    """(case, pod spec, container) of every router or worker."""
    for case, name, container in every_container():
        if container == component:
            yield case, pod_of(case, name), container_of(case, name, container)


@pytest.mark.parametrize(("case", "name"), every_pod())
def test_pods_are_hardened(case: str, name: str) -> None:
    spec = pod_of(case, name)
    assert spec["automountServiceAccountToken"] is False
    # Else a Service called loraplex would set LORAPLEX_PORT, an option.
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in spec.get("volumes", ()))


@pytest.mark.parametrize(("case", "name", "container"), every_container())
def test_containers_are_hardened_and_bounded(case: str, name: str, container: str) -> None:
    found = container_of(case, name, container)
    security = found["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["runAsNonRoot"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in security
    assert found["resources"]["limits"]["memory"]
    assert found["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert re.search(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$", found["image"])


@pytest.mark.parametrize(("case", "name"), every_pod())
def test_volumes_are_bounded_and_mounts_have_one(case: str, name: str) -> None:
    spec = pod_of(case, name)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    claims = {
        template["metadata"]["name"]
        for thing in of_kind(objects(case), "StatefulSet")
        if thing["metadata"]["name"] == name
        for template in thing["spec"].get("volumeClaimTemplates", ())
    }
    for volume in volumes.values():
        assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], volume
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", ()):
            assert mount["name"] in volumes.keys() | claims


@pytest.mark.parametrize("case", CASES)
def test_no_secret_stands_in_the_open(case: str) -> None:
    """Credentials are files of Secrets, or variables that name one."""
    for _, spec in pods(objects(case)):
        for container in spec["containers"]:
            for variable in container.get("env", ()):
                if not _SECRET_NAME.search(variable["name"]):
                    continue
                if "value" in variable:
                    assert variable["name"].endswith("_PATH")
                    assert variable["value"].startswith(CREDENTIALS)
                else:
                    assert "secretKeyRef" in variable["valueFrom"]
            for arg in container.get("args", ()):
                flag, _, value = arg.partition("=")
                assert flag.removeprefix("--") not in SECRETS, arg
                if flag.removeprefix("--").removesuffix("-file") in {*SECRETS, "keys"}:
                    assert value.startswith(CREDENTIALS)
    for config in of_kind(objects(case), "ConfigMap"):
        if "dashboard" not in config["metadata"]["name"]:
            assert not re.search(r"(?i)(password|token|secret)\s*[:=]\s*\S", str(config["data"]))


@pytest.mark.parametrize("case", CASES)
def test_named_credentials_are_mounted(case: str) -> None:
    for _, spec in pods(objects(case)):
        there = {
            CREDENTIALS + item["path"]
            for volume in spec.get("volumes", ())
            for source in volume.get("projected", {}).get("sources", ())
            for item in source["secret"]["items"]
        }
        named = {
            word
            for container in spec["containers"]
            for text in (
                *container.get("args", ()),
                *container.get("command", ()),
                *(variable.get("value", "") for variable in container.get("env", ())),
            )
            for word in re.findall(rf"{CREDENTIALS}\w+", text)
        }
        assert named == there


def flags(container: Object) -> dict[str, str]:
    pairs = (arg.partition("=") for arg in container["args"] if arg.startswith("--"))
    return {flag.removeprefix("--"): value for flag, _, value in pairs}


def timeouts(spec: Object, container: Object) -> tuple[float, float, float]:
    """Seconds: before SIGTERM, of the drain, until SIGKILL."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    waits = float(command[1]) if command else 0.0
    given = flags(container)
    drain = float(given["drain-timeout-s"]) + float(given.get("drain-delay-s", 0))
    return waits, drain, spec["terminationGracePeriodSeconds"]


def test_everyone_drains_before_it_is_killed() -> None:
    """What a router answers is never cut off; what a worker runs may go on at another."""
    for component in ("router", "worker"):
        for _, spec, container in of_loraplex(component):
            waits, drain, grace = timeouts(spec, container)
            assert grace > waits + drain
            if component == "router":
                assert waits > 0
                assert drain >= float(flags(container)["request-timeout-s"])


def test_nothing_in_front_is_less_patient_than_the_router() -> None:
    (_, _, router) = next(of_loraplex("router"))
    found = objects("fleet")
    request = max(float(flags(c)["request-timeout-s"]) for _, _, c in of_loraplex("router"))
    assert request > float(flags(router)["request-timeout-s"]) - 1
    (ingress,) = of_kind(found, "Ingress")
    notes = ingress["metadata"]["annotations"]
    assert float(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= request
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    (route,) = of_kind(found, "HTTPRoute")
    for rule in route["spec"]["rules"]:
        assert float(rule["timeouts"]["request"].removesuffix("s")) >= request


def test_metrics_stay_inside() -> None:
    found = objects("fleet")
    (ingress,) = of_kind(found, "Ingress")
    (route,) = of_kind(found, "HTTPRoute")
    paths = [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    matches = [match for rule in route["spec"]["rules"] for match in rule["matches"]]
    prefixes = [m["path"]["value"] for m in matches if m["path"]["type"] == "PathPrefix"]
    assert "/v1" in paths
    assert "/v1" in prefixes
    assert not any("/metrics".startswith(path) for path in (*paths, *prefixes) if path != "/")
    assert "/" not in prefixes


@pytest.mark.parametrize("component", ["router", "worker"])
def test_probes_mean_different_things(component: str) -> None:
    for case, _, container in of_loraplex(component):
        paths = {
            kind: container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "readiness", "liveness")
        }
        # Never what depends on somebody else: a router is not killed for its workers' sake.
        assert paths["liveness"] == LIVE
        if component == "worker":
            assert paths == {"startup": READY, "readiness": READY, "liveness": LIVE}
            startup = container["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
        else:
            assert paths["startup"] == LIVE
            assert paths["readiness"] == (LIVE if case == "scale-to-zero" else READY)
        liveness = container["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
        ports = {port["name"] for port in container["ports"]}
        assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in paths} <= ports


@pytest.mark.parametrize("component", ["router", "worker"])
def test_every_argument_is_an_option(component: str) -> None:
    """Read as `loraplex` reads them; secrets are files that are not here."""
    options = ROUTER_OPTIONS if component == "router" else WORKER_OPTIONS
    config = RouterConfig if component == "router" else WorkerConfig
    for _, _, container in of_loraplex(component):
        command, *rest = container["args"]
        assert command == component
        parser = Parser(prog="loraplex")
        if component == "worker":
            parser.add_argument("model")
        add_options(parser, options)
        arguments = parser.parse_args([arg for arg in rest if not arg.endswith("credentials")])
        secret = [option for option in options if option.is_secret]
        for option in secret:
            setattr(arguments, f"{option.field}_file", None)
        values = resolve(options, arguments, {})
        built = build(config, values)
        assert built.port == container["ports"][0]["containerPort"]


@pytest.mark.parametrize("component", ["router", "worker"])
def test_every_variable_of_ours_is_an_option(component: str) -> None:
    for _, _, container in of_loraplex(component):
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names))
        check_variables({name: "" for name in names if name.startswith(PREFIX)})


def test_policies_cover_every_pod_that_stays() -> None:
    found = objects("fleet")
    policies = of_kind(found, "NetworkPolicy")
    for thing in of_kind(found, "Deployment", "StatefulSet"):
        labels = thing["spec"]["template"]["metadata"]["labels"].items()
        mine = [
            policy
            for policy in policies
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels
        ]
        assert len(mine) == 1
        assert mine[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in mine[0]["spec"]["ingress"]:
            assert rule["from"], "a fleet's pods are not open to everyone"


# (of Redis, where routers may go for it)
REDIS: list[tuple[str, set[int]]] = [
    ("redis+sentinel://loraplex@s0:26379,s1:26380/main", {26379, 26380, 6379}),
    ("redis+sentinel://s0,s1:5000/main", {26379, 5000, 6379}),
    ("redis://host/0", {6379}),
    ("redis://host:7000/0?socket_timeout=1", {7000}),
    ("rediss://[fd00:1::2]:6380/0", {6380}),
    ("rediss://user@[fd00:1::2]/0", {6379}),
]
COLLECTORS: list[tuple[str, set[int]]] = [
    ("", set()),
    ("http://collector.monitoring:4318", {4318}),
    ("http://collector.monitoring", {80}),
    ("http://collector/v1:9/traces", {80}),
    ("https://collector.example.com/v1/traces", {443}),
    ("http://[fd00:1::2]:4318", {4318}),
    ("https://[fd00:1::2]", {443}),
]


def egress_of_router(change: Object) -> set[int]:
    """Ports, but for those that workers may go to as well, and the workers' own."""
    closed: Object = {"networkPolicy": {"enabled": True, "egressPorts": []}}
    found = objects_of(render(merged(merged(values_of("small"), closed), change)))
    router, *_ = of_kind(found, "NetworkPolicy")
    return {port["port"] for rule in router["spec"]["egress"] for port in rule["ports"]} - {
        53,
        8090,
    }


@pytest.mark.parametrize(("url", "ports"), REDIS)
def test_routers_may_reach_redis(url: str, ports: set[int]) -> None:
    assert egress_of_router({"redis": {"mode": "external", "url": url}}) == ports


@pytest.mark.parametrize(("endpoint", "ports"), COLLECTORS)
def test_routers_may_reach_the_collector(endpoint: str, ports: set[int]) -> None:
    assert egress_of_router({"tracing": {"endpoint": endpoint}}) == ports


def test_memory_limits_hold_the_host_arena() -> None:
    for _, spec, container in of_loraplex("worker"):
        limit = container["resources"]["limits"]["memory"]
        units = {"Mi": 2**20, "Gi": 2**30}
        assert (
            float(flags(container)["host-adapter-memory"]) < float(limit[:-2]) * units[limit[-2:]]
        )
        (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"


def test_the_worker_has_a_gpu_or_says_cpu() -> None:
    for _, _, container in of_loraplex("worker"):
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert flags(container)["device"] == ("cuda" if has_gpu else "cpu")


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_gpus_of_a_worker_share_its_model(gpus: int) -> None:
    change: Object = {"worker": {"gpus": gpus}}
    found = objects_of(render(merged(values_of("small"), change)))
    (worker,) = of_kind(found, "StatefulSet")
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert flags(container).get("tp", "1") == str(gpus)


def test_values_of_tests_are_not_shipped() -> None:
    assert "ci/" in (CHART / ".helmignore").read_text()
