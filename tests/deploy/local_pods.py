"""Runs rendered pods as processes of this machine: their arguments, variables, files and probes.

What a kubelet does and no more: paths of mounts become folders, addresses become local ports. Pods
are stopped as Kubernetes stops them: preStop, SIGTERM, and SIGKILL when the grace period is over.
"""

import asyncio
import base64
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from tests.deploy.chart import ROOT, Object, of_kind
from tests.ports import free_port
from tests.tethered import tethered

START_TIMEOUT_S = 240.0
_POLL_S = 0.05
# An address inside the cluster: what stands before it, the pod's or Service's name.
_ADDRESS = re.compile(r"(--worker=ws://|--redis=redis://[^@]*@)([^.:]+)[^:/]*:\d+")


class Cluster:
    """The objects of one release on this machine. hosts: a pod's name to its local port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, int] = {}

    def port_of(self, pod: str) -> int:
        """A pod that is replaced under the same name keeps its address."""
        return self.hosts.setdefault(pod, free_port())

    def pod(self, owner: Object, name: str, objects: Sequence[Object]) -> "LocalPod":
        """owner: a Deployment or StatefulSet among `objects`."""
        return LocalPod(self, name, owner["spec"]["template"]["spec"], objects)


class LocalPod:
    """One life of a pod with one container."""

    def __init__(
        self, cluster: Cluster, name: str, spec: Object, objects: Sequence[Object]
    ) -> None:
        self.name = name
        self.port = cluster.port_of(name)
        self._cluster = cluster
        self._spec = spec
        (self._container,) = spec["containers"]
        self._folder = cluster.folder / f"{name}.{len(list(cluster.folder.iterdir()))}"
        self._folder.mkdir()
        self._mounts = self._make_mounts(objects)
        self._process: asyncio.subprocess.Process | None = None
        self.log = self._folder / "log"

    # Files

    def _make_mounts(self, objects: Sequence[Object]) -> dict[str, Path]:
        """Folders by the paths where the container has them."""
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        mounts = {}
        for mount in self._container["volumeMounts"]:
            folder = self._folder / mount["name"]
            folder.mkdir(exist_ok=True)
            if mount["mountPath"] not in ("/tmp", "/dev/shm"):
                mounts[mount["mountPath"]] = folder
        self._mounts = mounts
        for mount in self._container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            _fill(self._folder / mount["name"], volume, objects, self._local)
        return mounts

    def _local(self, text: str) -> str:
        """Paths and ports as they are here."""
        inside = self._container["ports"][0]["containerPort"]
        text = re.sub(rf"(--port[= ]|-p ){inside}\b", rf"\g<1>{self.port}", text)
        text = _ADDRESS.sub(lambda m: f"{m[1]}127.0.0.1:{self._cluster.port_of(m[2])}", text)
        paths = "|".join(sorted(map(re.escape, self._mounts), key=len, reverse=True))
        text = re.sub(rf"(?<![\w/])({paths})(?![\w-])", lambda m: str(self._mounts[m[1]]), text)
        return text.replace("$(POD_NAME)", self.name)

    # Processes

    def arguments(self) -> list[str]:
        """What the container runs; the entrypoint of our images is `loraplex`."""
        entrypoint = self._container.get("command") or [sys.executable, "-m", "loraplex"]
        return [self._local(word) for word in (*entrypoint, *self._container.get("args", ()))]

    def environment(self) -> dict[str, str]:
        given = {
            variable["name"]: self._local(variable.get("value", self.name))
            for variable in self._container.get("env", ())
            if "resourceFieldRef" not in variable.get("valueFrom", {})
        }
        path = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return path | given | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    async def start(self) -> None:
        with self.log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                *tethered(*self.arguments()),
                cwd=ROOT,
                env=self.environment(),
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
            )

    async def probe(self, kind: str) -> bool:
        """Asks once, as the rendered probe says. kind: startup, readiness, liveness."""
        probe = self._container[f"{kind}Probe"]
        if "httpGet" in probe:
            return await self._get(probe["httpGet"]["path"])
        if "exec" in probe:
            return not await self.run(*probe["exec"]["command"])
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def run(self, *command: str) -> int:
        """The exit code of a command in the container."""
        local = [self._local(word) for word in command]
        process = await asyncio.create_subprocess_exec(*tethered(*local), env=self.environment())
        return await process.wait()

    async def _get(self, path: str) -> bool:
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                answer = await http.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)
            except httpx.TransportError:
                return False
        return 200 <= answer.status_code < 400

    async def until(self, kind: str) -> None:
        """Polls a probe, bounded in time."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self.probe(kind):
                process = self._process
                assert process is not None, self.log.read_text()
                assert process.returncode is None, self.log.read_text()
                await asyncio.sleep(_POLL_S)

    async def ready(self) -> None:
        await self.until("startup")
        await self.until("readiness")

    async def stop(self) -> int:
        """preStop, SIGTERM, and SIGKILL after the grace period. The exit code."""
        assert self._process is not None
        hook = self._container.get("lifecycle", {}).get("preStop", {}).get("exec")
        try:
            async with asyncio.timeout(self._spec["terminationGracePeriodSeconds"]):
                if hook is not None:
                    await self.run(*hook["command"])
                self._process.send_signal(signal.SIGTERM)
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _fill(
    folder: Path,
    volume: Mapping[str, Object],
    objects: Sequence[Object],
    local: Callable[[str], str],
) -> None:
    """Files of ConfigMaps and Secrets; a Secret that somebody else makes is made up."""
    if "configMap" in volume:
        (config,) = [
            thing
            for thing in of_kind(list(objects), "ConfigMap")
            if thing["metadata"]["name"] == volume["configMap"]["name"]
        ]
        for name, text in config["data"].items():
            (folder / name).write_text(local(text))
    for source in volume.get("projected", {}).get("sources", ()):
        named = source["secret"]["name"]
        data = {
            thing["metadata"]["name"]: thing["data"] for thing in of_kind(list(objects), "Secret")
        }.get(named, {})
        for item in source["secret"]["items"]:
            kept = data.get(item["key"])
            made_up = f"{named}-{item['key']}".encode()
            (folder / item["path"]).write_bytes(base64.b64decode(kept) if kept else made_up)
