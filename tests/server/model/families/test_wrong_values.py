"""Any value of any field gives a spec, or a refusal that names a field: never another error."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.registry import read_model
from tests.server.model.families.encoders import ENCODERS
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import SIZES

Config = dict[str, Any]
Path = tuple[str, ...]
WRONG: tuple[object, ...] = (
    *(None, True, False, 0, -1, 3, 0.5, -2.5, float("nan"), float("inf"), 10**7),
    *("x", "", [], [1], ["x"], [None], {}, {"x": 1}, [[1, 2], 3]),
)
# Keys of rotations, which readers take from a table.
TURNS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
    *("alpha", "llama_4_scaling_beta", "short_mscale", "long_mscale", "mrope_section"),
)
KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
REFUSED = ("not supported: ", "not served", "text_config", "must be", "no model_type")
SAMPLED = 600


class Asked(dict[str, Any]):
    """A configuration that notes the keys that readers ask for."""

    keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)


@cache
def configs() -> dict[str, Config]:
    known = {f"known {name}": dict(of.config) for name, of in served_families().items()}
    rows = {
        name: json.loads(row.config(**{**SIZES, **row.settings}).to_json_string())
        for name, row in VARIANTS.items()
    }
    encoders = {name: json.loads(row.make().to_json_string()) for name, row in ENCODERS.items()}
    return {**known, **rows, **encoders}


def paths(config: Mapping[str, Any]) -> Iterator[Path]:
    for key, value in config.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, *rest) for rest in paths(value))


def changed(config: Mapping[str, Any], path: Path, value: object) -> Config:
    first, *rest = path
    inner = config.get(first)
    if rest:
        value = changed(inner if isinstance(inner, Mapping) else {}, tuple(rest), value)
    return {**config, first: value}


def asked(config: Config, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Keys that the reader of the configuration asks for, those that are not there included."""
    begin = Fields.__init__
    Asked.keys_asked = set()
    with monkeypatch.context() as patched:
        patched.setattr(Fields, "__init__", lambda self, of: begin(self, Asked(of)))
        is_read(config)
    return Asked.keys_asked


def is_read(config: Config) -> bool:
    try:
        read_model(config)
    except ValueError as error:
        if type(error) is ValueError and any(words in str(error) for words in REFUSED):
            return False
        raise
    return True


def places(config: Config, monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    within: Path = ("text_config",) if isinstance(config.get("text_config"), dict) else ()
    found = {*paths(config), *((*within, key) for key in asked(config, monkeypatch))}
    return sorted(found - {("model_type",)})


def turned(config: Config) -> Iterator[tuple[Config, Path]]:
    """The configuration with a table for each kind of rotation, and the keys in it."""
    within: Path = ("text_config",) if isinstance(config.get("text_config"), dict) else ()
    for kind in KINDS:
        table = (*within, "rope_scaling")
        with_kind = changed(config, table, {"rope_type": kind, "factor": 2.0})
        for key in TURNS:
            yield with_kind, (*table, key)


def failures(tries: Sequence[tuple[str, Config, Path, object]]) -> list[str]:
    found = []
    for name, config, path, value in tries:
        try:
            is_read(changed(config, path, value))
        except Exception as error:
            found.append(f"{name}: {'.'.join(path)} = {value!r}: {error!r}")
    return found


def test_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, tries = random.Random(7), []
    every = configs()
    for name in chance.choices([*every], k=SAMPLED // 30):
        own = [(every[name], path) for path in places(every[name], monkeypatch)]
        chosen = [*chance.choices(own, k=22), *chance.choices([*turned(every[name])], k=8)]
        tries += [(name, config, path, chance.choice(WRONG)) for config, path in chosen]
    assert failures(tries) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
def test_every_value_of_every_field(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in [*configs()][part::8]:
        config = configs()[name]
        own = [(config, path) for path in places(config, monkeypatch)]
        tables = turned(config) if name.startswith("known ") else ()
        for of, path in (*own, *tables):
            found += failures([(name, of, path, value) for value in WRONG])
    assert found == []
