"""Runs rendered pods as processes of this machine: their arguments, variables, files and probes.

What a kubelet does and no more: paths of mounts become folders, addresses become local ports. Pods
are stopped as Kubernetes stops them: preStop, SIGTERM, and SIGKILL when the grace period is over.
"""

import asyncio
import base64
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.deploy.chart import ROOT, Object, of_kind

START_TIMEOUT_S = 90.0
_POLL_S = 0.05
_WORKER_URL = re.compile(r"(--worker=ws://)([^.:]+)[^:]*:\d+")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
            _fill(folder, volumes.get(mount["name"], {}), objects)
            mounts[mount["mountPath"]] = folder
        return mounts

    def _local(self, text: str) -> str:
        for path, folder in self._mounts.items():
            if path not in ("/tmp", "/dev/shm"):
                text = text.replace(path, str(folder))
        return text

    # Processes

    def arguments(self) -> list[str]:
        inside = self._container["ports"][0]["containerPort"]
        found = []
        for arg in self._container["args"]:
            arg = arg.replace("$(POD_NAME)", self.name)
            if arg == f"--port={inside}":
                arg = f"--port={self.port}"
            match = _WORKER_URL.fullmatch(arg)
            if match is not None:
                arg = f"{match[1]}127.0.0.1:{self._cluster.port_of(match[2])}"
            found.append(self._local(arg))
        return found

    def environment(self) -> dict[str, str]:
        given = {
            variable["name"]: self._local(variable.get("value", self.name))
            for variable in self._container["env"]
            if "resourceFieldRef" not in variable.get("valueFrom", {})
        }
        path = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return path | given | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    async def start(self) -> None:
        # The image's entrypoint is `loraplex`.
        with self.log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "launcher",
                *self.arguments(),
                cwd=ROOT,
                env=self.environment(),
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
            )

    async def probe(self, kind: str) -> bool:
        """Asks once, as the rendered probe says. kind: startup, readiness, liveness."""
        path = self._container[f"{kind}Probe"]["httpGet"]["path"]
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
                    waiting = await asyncio.create_subprocess_exec(*hook["command"])
                    await waiting.wait()
                self._process.send_signal(signal.SIGTERM)
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _fill(folder: Path, volume: Mapping[str, Object], objects: Sequence[Object]) -> None:
    """Files of ConfigMaps and Secrets; a Secret that somebody else makes is made up."""
    if "configMap" in volume:
        (config,) = [
            thing
            for thing in of_kind(list(objects), "ConfigMap")
            if thing["metadata"]["name"] == volume["configMap"]["name"]
        ]
        for name, text in config["data"].items():
            (folder / name).write_text(text)
    for source in volume.get("projected", {}).get("sources", ()):
        named = source["secret"]["name"]
        data = {
            thing["metadata"]["name"]: thing["data"] for thing in of_kind(list(objects), "Secret")
        }.get(named, {})
        for item in source["secret"]["items"]:
            kept = data.get(item["key"])
            made_up = f"{named}-{item['key']}".encode()
            (folder / item["path"]).write_bytes(base64.b64decode(kept) if kept else made_up)
