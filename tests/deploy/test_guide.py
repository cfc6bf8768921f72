"""The guide to Kubernetes: its values install, and its commands name what they install."""

import re
from pathlib import Path

import yaml

from tests.deploy.chart import objects_of, of_kind, render

GUIDE = (Path(__file__).parents[2] / "docs/guides/kubernetes.md").read_text()
# What kubectl calls them, and their kinds.
COMMANDS = {"svc": "Service", "deployment": "Deployment", "statefulset": "StatefulSet"}


def test_values_and_names() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)
    values = yaml.safe_load(block)
    rendered = objects_of(render(values, release="lora"))
    for word, kind in COMMANDS.items():
        named = set(re.findall(rf"\b{word}/([\w-]+)", GUIDE))
        there = {each["metadata"]["name"] for each in of_kind(rendered, kind)}
        assert set() < named <= there, kind
    made = set(re.findall(r"create secret generic ([\w-]+)", GUIDE))
    assert {secret["name"] for secret in values["secrets"].values()} == made
    models = set(re.findall(r'"model": "(\w+)"', GUIDE))
    assert models == {adapter["name"] for adapter in values["adapters"]}
