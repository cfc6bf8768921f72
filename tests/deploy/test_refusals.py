"""Values that cannot work are refused before anything is installed, with what to change."""

import helm_python as helm
import pytest

from tests.deploy.chart import Object, case, merged, objects_of, render

FLEET = "fleet"
ACCOUNT: Object = {"create": True, "name": "loraplex"}
KEDA: Object = {"worker": {"autoscaling": {"kind": "keda", "minReplicas": 0}}}

# (case, change, what the message holds)
UNFIT: list[tuple[str, Object, str]] = [
    ("small", {"model": {"id": ""}}, "model.id is needed"),
    ("small", {"images": {"router": {"repository": ""}}}, "images.router.repository is needed"),
    ("small", {"images": {"worker": {"repository": ""}}}, "images.worker.repository is needed"),
    ("small", {"router": {"filesClaim": "f", "replicas": 2}}, "routers share batches by Redis"),
    ("small", {"router": {"drainSeconds": 30}}, "a request may take requestTimeoutSeconds (600)"),
    ("small", {"router": {"terminationGracePeriodSeconds": 600}}, "needs at least 620"),
    ("small", {"worker": {"terminationGracePeriodSeconds": 30}}, "pool main: terminationGrace"),
    ("small", {"worker": {"drainSeconds": 60}}, "no second worker that could go on"),
    ("small", {"pools": [{"name": "a"}, {"name": "a"}]}, 'pools: "a" is there twice'),
    ("small", {"worker": {"replicas": 3, "maxReplicas": 2}}, "routers look for maxReplicas (2)"),
    ("small", {"worker": {"hostAdapterMemory": "4500Mi"}}, "must leave 1Gi beside them"),
    ("small", {"worker": {"adapterDisk": "20Gi"}}, "larger than cache.size (10Gi)"),
    ("small", {"adapters": [{"name": "a", "ref": "s3:b/c"}]}, "the bucket b, which pool main"),
    ("small", {"adapters": [{"name": "a", "ref": "https://h/c"}]}, "the host h, which pool main"),
    ("small", {"adapters": [{"name": "a", "ref": "local:/c"}]}, "no options.adapter-root"),
    (
        "small",
        {
            "router": {"options": {"watch-folder": ["/srv/a"]}},
            "worker": {"options": {"adapter-root": ["/srv/ab"]}},
        },
        "pool main may not read /srv/a: mount it",
    ),
    (
        "small",
        {"adapters": [{"name": "a", "ref": "modelscope:b/c"}]},
        "add it to options.modelscope",
    ),
    (
        "small",
        {"hubOwners": ["acme"], "adapters": [{"name": "a", "ref": "hub:evil/a"}]},
        '"a" belongs to evil, who is not in hubOwners',
    ),
    (
        "small",
        {
            "hubOwners": ["acme"],
            "adapters": [
                {
                    "name": "a",
                    "ref": "hub:acme/a",
                    "versions": [{"reference": "hub:evil/b", "weight": 5}],
                }
            ],
        },
        '"a" belongs to evil, who is not in hubOwners',
    ),
    (
        "small",
        {"adapters": [{"name": "a", "ref": "hub:x/a"}, {"name": "a", "ref": "hub:x/b"}]},
        'adapters: "a" is there twice',
    ),
    (
        "small",
        {"adapters": [{"name": "a", "ref": f"hub:x/{n}", "tenant": "acme"} for n in "ab"]},
        'adapters: "acme::a" is there twice',
    ),
    ("small", KEDA, "set monitoring.prometheusAddress"),
    ("scale-to-zero", {"router": {"readyWithoutWorkers": False}}, "no request reaches a router"),
    ("scale-to-zero", {"router": {"options": {"worker-wait-s": 9}}}, "at least 60, got 9"),
    ("hpa", {"worker": {"autoscaling": {"minReplicas": 0}}}, "an HPA keeps at least one"),
    ("hpa", {"worker": {"autoscaling": {"minReplicas": 9}}}, "is above autoscaling.maxReplicas"),
    (
        "small",
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "router: autoscaling.minReplicas (9) is above autoscaling.maxReplicas (8)",
    ),
    ("hpa", {"worker": {"maxReplicas": 5}}, "routers look for maxReplicas (5) only"),
    ("small", {"router": {"options": {"auth": "keys"}}}, "callers need keys"),
    ("small", {"router": {"options": {"auth": "keys"}}}, "callers need keys"),
    ("small", {"redis": {"mode": "external"}}, "redis.url is needed"),
    (
        "small",
        {"router": {"options": {"key-outage": "open"}}},
        "router options.key-outage is no option any more: --quota-outage closed answers 503",
    ),
    (
        "small",
        {"worker": {"options": {"page-size": 32}}},
        "worker options.page-size is no option any more: a page of the KV cache has 16 tokens",
    ),
    (
        "small",
        {"pools": [{"name": "a"}, {"name": "b", "options": {"max-waiting": 3}}]},
        "pool b: options.max-waiting is no option any more: a worker takes a quarter",
    ),
    (
        "small",
        {"router": {"options": {"drain-timeout-s": 1}}},
        "options.drain-timeout-s is set by the chart, from router.drainSeconds",
    ),
    ("small", {"worker": {"options": {"host": "::"}}}, "options.host is set by the chart"),
    ("hpa", {"redis": {"url": "redis://other:6379/0"}}, "redis.mode is bundled, not external"),
    (
        "small",
        {"serviceAccounts": {"router": ACCOUNT, "worker": ACCOUNT}},
        '"loraplex" is created twice',
    ),
    (FLEET, {"ingress": {"hosts": []}}, "ingress.hosts is needed"),
    (FLEET, {"httpRoute": {"parentRefs": []}}, "httpRoute.parentRefs is needed"),
    (FLEET, {"worker": {"options": {"s3-bucket": ["other"]}}}, "acme-adapters, which pool h200"),
]

# (change, where the schema says that it is wrong)
MISWRITTEN: list[tuple[Object, str]] = [
    ({"replicas": 1}, "replicas"),
    ({"router": {"replica": 1}}, "replica"),
    ({"router": {"replicas": "2"}}, "/router/replicas"),
    ({"router": {"port": 80}}, "/router/port"),
    ({"router": {"options": {"max-quue": 1}}}, "max-quue"),
    ({"router": {"options": {"max-queue": 0}}}, "/router/options/max-queue"),
    ({"router": {"options": {"secret": "in the open"}}}, "secret"),
    ({"router": {"options": {"max-body-bytes": "lots"}}}, "/router/options/max-body-bytes"),
    ({"worker": {"options": {"dtype": "int3"}}}, "/worker/options/dtype"),
    ({"worker": {"options": {"s3-bucket": "one"}}}, "/worker/options/s3-bucket"),
    ({"worker": {"gpus": 65}}, "/worker/gpus"),
    ({"worker": {"hostAdapterMemory": "16 GB"}}, "/worker/hostAdapterMemory"),
    (
        {"worker": {"extraEnv": [{"name": "LORAPLEX_PORT", "value": "1"}]}},
        "/worker/extraEnv/0/name",
    ),
    ({"pools": []}, "/pools"),
    ({"pools": [{"name": "Main"}]}, "/pools/0/name"),
    ({"pools": [{"name": "a", "gpu": 1}]}, "gpu"),
    ({"adapters": [{"name": "a b", "ref": "hub:x/y"}]}, "/adapters/0/name"),
    ({"adapters": [{"name": "a", "ref": "x/y"}]}, "/adapters/0/ref"),
    ({"adapters": [{"name": "a", "ref": "hub:x/y", "tenant": "a/b"}]}, "/adapters/0/tenant"),
    (
        {"adapters": [{"name": "a", "ref": "hub:x/y", "versions": [{"reference": "hub:x/z"}]}]},
        "/adapters/0/versions/0",
    ),
    ({"adapters": [{"name": "a", "ref": "hub:x/y", "guards": {"window": 1}}]}, "window"),
    ({"images": {"router": {"digest": "sha256:short"}}}, "/images/router/digest"),
    ({"secrets": {"adminKey": {"value": "in the open"}}}, "value"),
    ({"podSecurity": {"runAsUser": 0}}, "/podSecurity/runAsUser"),
    ({"model": {"id": "--flag"}}, "/model/id"),
    ({"redis": {"mode": "external", "url": "redis://user:word@host/0"}}, "/redis/url"),
    ({"redis": {"mode": "none", "password": "in the open"}}, "password"),
    ({"requestTimeoutSeconds": 0}, "/requestTimeoutSeconds"),
    ({"fullnameOverride": "1abc"}, "/fullnameOverride"),
    ({"nameOverride": "a.b"}, "/nameOverride"),
]


@pytest.mark.parametrize(("name", "change", "message"), UNFIT)
def test_values_that_do_not_fit_together(name: str, change: Object, message: str) -> None:
    render(case(name))
    with pytest.raises(helm.HelmError) as refusal:
        render(merged(case(name), change))
    assert message in str(refusal.value)


@pytest.mark.parametrize(("change", "place"), MISWRITTEN)
def test_values_that_are_miswritten(change: Object, place: str) -> None:
    with pytest.raises(helm.HelmError) as refusal:
        render(merged(case("small"), change))
    assert place in str(refusal.value)


@pytest.mark.parametrize("release", ["1st", "my.release"])
def test_a_release_whose_name_no_service_can_have(release: str) -> None:
    with pytest.raises(helm.HelmError, match="set fullnameOverride"):
        render(case("small"), release=release)
    render(merged(case("small"), {"fullnameOverride": "fine"}), release=release)


def test_names_that_look_like_other_values_stay_names() -> None:
    values = merged(case("small"), {"nameOverride": "true", "fullnameOverride": "fine"})
    for made in objects_of(render(values, release="123")):
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "true"
        assert labels["app.kubernetes.io/instance"] == "123"


def test_options_reach_the_command_line_as_they_were_meant() -> None:
    values = merged(
        case("small"),
        {"router": {"options": {"max-queue": 1234567890, "share-hub-token": True, "max-n": 3}}},
    )
    text = render(values)["loraplex/templates/router-deployment.yaml"]
    for flag in ("--max-queue=1234567890", "--share-hub-token", "--max-n=3"):
        assert f'- "{flag}"' in text
