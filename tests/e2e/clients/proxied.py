"""litellm's proxy: Anthropic's messages by each provider that reaches the server."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.clients.asking import JSON, KEY, MESSAGE, check, run
from tests.tethered import tethered

PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
START_S = 200.0


@contextlib.contextmanager
def proxy(url: str) -> Iterator[httpx.Client]:
    """A client of a proxy before the server, whose models are named after providers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = ["model_list:"]
    for provider, path in PROVIDERS.items():
        place = f"model: {provider}/{JSON}, api_base: '{url}{path}', api_key: {KEY}"
        lines.append(f"  - {{model_name: {provider}, litellm_params: {{{place}}}}}")
    key = f"sk-{secrets.token_hex(32)}"
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text("\n".join(lines))
        options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        command = [str(Path(sys.executable).with_name("litellm")), *options]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(tethered(*command), env=environ, stdout=log, stderr=log)
        try:
            headers, address = {"authorization": f"Bearer {key}"}, f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=address, headers=headers, timeout=240) as client:
                _await(client, process)
                yield client
        finally:
            process.terminate()
            process.wait(timeout=60)


def _await(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health/liveliness").status_code == 200:
                return
        time.sleep(0.2)  # polls a condition, bounded by the deadline
    raise SystemExit("the proxy does not start")


def messages(url: str) -> None:
    body: dict[str, Any] = {"max_tokens": 60, "messages": [{"role": "user", "content": MESSAGE}]}
    with proxy(url) as client:
        for provider in PROVIDERS:
            asked = body | {"model": provider}
            whole = client.post("/v1/messages", json=asked)
            check(whole.status_code == 200, f"{provider}: {whole.text}")
            texts = [one["text"] for one in whole.json()["content"] if one["type"] == "text"]
            check(bool("".join(texts)), f"{provider}: {whole.text}")
            streamed = client.post("/v1/messages", json=asked | {"stream": True})
            check("event: message_stop" in streamed.text, f"{provider}, streamed: {streamed.text}")


if __name__ == "__main__":
    run(messages)
