"""The chart through a real Helm engine, offline: values in, Kubernetes objects out."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/loraplex"
RELEASE, NAMESPACE = "demo", "serving"
CASES = {path.stem: path for path in sorted((CHART / "ci").glob("*.yaml"))}

Object = dict[str, Any]


def case(name: str) -> Object:
    loaded: Object = yaml.safe_load(CASES[name].read_text())
    return loaded


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> Object:
    """As Helm merges values: maps by key, all else replaced."""
    result = dict(base)
    for key, value in change.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def render(
    values: Mapping[str, Any], folder: Path = CHART, release: str = RELEASE
) -> dict[str, str]:
    """Text by template, schema and validations included. Raises helm.HelmError."""
    with helm.Chart.load(folder) as chart:
        chart.validate_schema(dict(values))
        rendered: dict[str, str] = chart.render(dict(values), name=release, namespace=NAMESPACE)
        return rendered


@cache
def texts(name: str) -> dict[str, str]:
    return render(case(name))


def objects_of(rendered: Mapping[str, str]) -> list[Object]:
    """Every object; a file's documents are apart."""
    found = []
    for path, text in rendered.items():
        if path.endswith(".yaml"):
            documents = yaml.load_all(text, Loader=yaml.CSafeLoader)  # in C: a tenth of the time
            found += [document for document in documents if document]
    return found


@cache
def objects(name: str) -> list[Object]:
    """Shared by tests, to be read only."""
    return objects_of(texts(name))


def of_kind(found: list[Object], *kinds: str) -> list[Object]:
    return [thing for thing in found if thing["kind"] in kinds]


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """(name, pod spec) of everything that becomes a pod."""
    for thing in found:
        if thing["kind"] in ("Deployment", "StatefulSet"):
            yield thing["metadata"]["name"], thing["spec"]["template"]["spec"]
        elif thing["kind"] == "Pod":
            yield thing["metadata"]["name"], thing["spec"]
