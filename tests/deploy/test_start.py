"""The chart's command lines start: a router and a worker as rendered, on the demo model."""

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loraplex.launcher.demo import adapter_paths, model_path
from tests.deploy.chart import Object, case, merged, objects, objects_of, of_kind, render
from tests.deploy.local_pods import START_TIMEOUT_S, Cluster, LocalPod

# In the folder's own terms: what a volume would bring into the workers.
VALUES: Object = {
    "model": {"id": str(model_path())},
    "adapters": [{"name": "sql", "ref": f"local:{adapter_paths()['sql']}", "pin": True}],
    "router": {"drainDelaySeconds": 1},
    "worker": {
        "options": {
            "executor": "torch",
            "adapter-root": [str(adapter_paths()["sql"])],
            "adapter-memory": "64MiB",
        }
    },
}


@dataclass
class Release:
    rendered: dict[str, str]
    objects: list[Object]
    router: LocalPod
    worker: LocalPod


@pytest.fixture
async def release(tmp_path: Path) -> AsyncIterator[Release]:
    rendered = render(merged(case("small"), VALUES))
    objects = objects_of(rendered)
    cluster = Cluster(tmp_path)
    (deployment,) = of_kind(objects, "Deployment")
    (stateful,) = of_kind(objects, "StatefulSet")
    worker = cluster.pod(stateful, f"{stateful['metadata']['name']}-0", objects)
    router = cluster.pod(deployment, deployment["metadata"]["name"], objects)
    try:
        await router.start()
        await router.until("startup")
        assert not await router.probe("readiness"), "no worker is there yet"
        await worker.start()
        await worker.ready()
        await router.ready()
        yield Release(rendered, objects, router, worker)
    finally:
        await router.kill()
        await worker.kill()


async def test_it_starts_answers_and_stops(release: Release) -> None:
    """And `helm test` tells a served release from none."""
    url = f"http://127.0.0.1:{release.router.port}"
    for pod in (release.router, release.worker):
        assert await pod.probe("liveness")

    notes = release.rendered["loraplex/templates/NOTES.txt"]
    words = shlex.split(re.search(r"curl .*", notes)[0])  # type: ignore[index]
    body = words[words.index("-d") + 1]
    async with httpx.AsyncClient(trust_env=False, timeout=240) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post(f"{url}/generate", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["generated_text"]
    good = helm_test(release, patience="5")
    assert good.returncode == 0, good.stderr
    assert "1 of 1 workers" in good.stdout

    # A worker that is gone makes the router unready, and never dead.
    assert await release.worker.stop() == 0, release.worker.log.read_text()
    assert not await release.router.probe("readiness")
    assert await release.router.probe("liveness")
    assert await release.router.stop() == 0, release.router.log.read_text()
    assert "Traceback" not in release.router.log.read_text() + release.worker.log.read_text()
    bad = helm_test(release, patience="0")
    assert bad.returncode == 1
    assert "is not ready" in bad.stderr


def helm_test(release: Release, patience: str) -> subprocess.CompletedProcess[str]:
    (pod,) = of_kind(release.objects, "Pod")
    (container,) = pod["spec"]["containers"]
    code, url, model, _ = container["args"]
    (service,) = [o for o in of_kind(release.objects, "Service") if "clusterIP" not in o["spec"]]
    assert url == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    command = [sys.executable, *container["command"][1:], code]
    arguments = [f"http://127.0.0.1:{release.router.port}", model, patience]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.exhaustive
async def test_the_bundled_redis_opens_to_routers_alone(tmp_path: Path) -> None:
    made = objects_of(render(merged(case("small"), {"redis": {"mode": "bundled"}})))
    cluster = Cluster(tmp_path)
    (deployment,) = of_kind(made, "Deployment")
    owner = next(o for o in of_kind(made, "StatefulSet") if "redis" in o["metadata"]["name"])
    redis = cluster.pod(owner, owner["metadata"]["name"], made)
    router = cluster.pod(deployment, "router", made)
    say = f"redis-cli -p {redis.port} --no-auth-warning --user loraplex"
    password = "REDISCLI_AUTH=$(cat /etc/loraplex/credentials/redis)"
    try:
        await redis.start()
        await redis.ready()
        await router.start()
        await router.until("startup")
        page = ""
        async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient(trust_env=False) as http:
            while "loraplex_redis_up 1.0" not in page:  # it may be late for once
                page = (await http.get(f"http://127.0.0.1:{router.port}/metrics")).text
        for metric in scaled_by():
            assert re.search(rf"^{metric} 0", page, re.M), "autoscalers ask for it"
        keys = f"{password} {say} --scan --pattern 'serving.demo-loraplex:*' | grep -q ."
        async with asyncio.timeout(START_TIMEOUT_S):
            while await redis.run("sh", "-c", keys):
                pass  # each look starts a process
        assert await redis.run("sh", "-c", f"{say} ping | grep -q NOAUTH") == 0
        assert await redis.run("sh", "-c", f"REDISCLI_AUTH=x {say} ping 2>&1 | grep -q WRONG") == 0
        assert await redis.run("sh", "-c", f"{password} {say} flushall | grep -q NOPERM") == 0
        await redis.kill()
        assert not await redis.probe("readiness")
        assert await router.probe("liveness")
    finally:
        await router.kill()
        await redis.kill()


def scaled_by() -> set[str]:
    (scaled,) = of_kind(objects("scale-to-zero"), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    return {match[1] for query in queries if (match := re.match(r"sum\((\w+)\{", query))}
