"""Which property distinguishes the options of a union, though not all of them require it. Pure."""

from collections.abc import Callable, Iterator
from typing import Any

from loraplex.router.shape.schema.keywords import same_text

_UNIONS = ("oneOf", "anyOf")
_MOST_STEPS = 100_000


class Tags:
    """Finds the tags of one schema. follow: to what a `$ref` names, None where there is nothing."""

    def __init__(self, follow: Callable[[str], Any]) -> None:
        self._follow = follow
        self._steps = 0

    def missing(self, schema: dict[str, Any], keyword: str) -> str | None:
        """A property that all options of `oneOf` or `anyOf` have, and some do not require.

        That is what `discriminator` names. For `oneOf` without one it is the first property whose
        constants all differ.
        """
        options: list[dict[str, Any]] = []
        for leaf in self._leaves(schema[keyword]):
            if leaf is None:
                return None
            options.append(leaf)
        tag = _named(schema.get("discriminator"))
        if tag is None and keyword == "oneOf":
            tag = next((name for name in options[0]["properties"] if _differ(name, options)), None)
        if tag is None or not all(tag in option["properties"] for option in options):
            return None
        return None if all(_requires(option, tag) for option in options) else tag

    def _leaves(self, options: list[Any]) -> Iterator[dict[str, Any] | None]:
        """The objects that the options are, or are unions of; None for what is none."""
        waiting = options[::-1]
        while waiting:
            option = waiting.pop()
            self._steps += 1
            if self._steps > _MOST_STEPS or not isinstance(option, dict):
                yield None
                return
            union = next((option[key] for key in _UNIONS if key in option), None)
            if isinstance(option.get("properties"), dict):
                yield option
            elif isinstance(option.get("$ref"), str):
                waiting.append(self._follow(option["$ref"]))
            elif isinstance(union, list):
                waiting += union[::-1]
            else:
                yield None


def _named(discriminator: Any) -> str | None:
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def _differ(name: str, options: list[dict[str, Any]]) -> bool:
    constants = [_constant(option["properties"].get(name)) for option in options]
    return None not in constants and len(set(constants)) == len(constants)


def _constant(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return same_text(schema["const"])
    values = schema.get("enum")
    return same_text(values[0]) if isinstance(values, list) and len(values) == 1 else None


def _requires(option: dict[str, Any], name: str) -> bool:
    required = option.get("required")
    return isinstance(required, list) and name in required
