"""Versions of an adapter of the demo, as uploads send them."""

import json

from loraplex.adapters.uploads.archive import adapter_files
from loraplex.launcher.demo import adapter_paths


def version(number: int) -> dict[str, tuple[str, bytes]]:
    """The files of a version: one adapter with a scale that no other version has."""
    files = {path.name: path.read_bytes() for path in adapter_files(adapter_paths()["sql"])}
    config = json.loads(files["adapter_config.json"])
    config["lora_alpha"] = config["lora_alpha"] + number / 1000
    files["adapter_config.json"] = json.dumps(config).encode()
    return {name: (name, content) for name, content in files.items()}
