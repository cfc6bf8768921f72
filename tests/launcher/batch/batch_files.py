"""Inputs of batches, and what their files hold afterwards."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def chat(custom_id: Any, adapter: str = "sql", **more: Any) -> bytes:
    body = {"model": adapter, "messages": [{"role": "user", "content": "hello"}], **more}
    return line(custom_id, "/v1/chat/completions", body)


def line(custom_id: Any, url: Any, body: Any, method: Any = "POST") -> bytes:
    said = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps(said).encode()


def write(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(text + b"\n" for text in lines))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def numbers(*paths: Path) -> list[int]:
    """Numbers of the lines that have an answer, sorted; one that has two is there twice."""
    return sorted(int(one["id"].split("_")[2]) for path in paths for one in records(path))
