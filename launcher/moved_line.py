"""A command line that was written for vLLM, SGLang or LoRAX, made one of `loraplex serve`. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loraplex.launcher.options import OptionError
from loraplex.launcher.other_servers import FLAGS, Arity, OtherOption, find

_COUNTED = ("--max-context", "--max-running", "--max-step-tokens", "--kv-memory")
# To ours; "" = nothing is to be said, as a checkpoint's config says it.
_RENAMED = {
    "half": "float16", "float": "float32", "fp8_e4m3": "fp8",
    "int8_per_token_head": "int8", "bitsandbytes": "nf4", "awq": "",
    "awq_marlin": "", "gptq": "", "gptq_marlin": "", "compressed-tensors": "", "modelopt": "",
}  # fmt: skip


@dataclass(slots=True)
class Moved:
    """A command line of another server, moved to this one. words: for the parser. notes: for a
    person. api_keys: in clear.
    """

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    api_keys: list[str] = field(default_factory=list)
    is_foreign: bool = False


def move(words: Sequence[str], own: Mapping[str, bool]) -> Moved:
    """Turns a command line of another server into one for this server. Move a line. own: known
    flags, and whether a value follows. Unknown ones stay. Raises OptionError, with no API key.
    """
    moved, left = Moved(), list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if not flag.startswith("-"):
            moved.words.append(flag + equals + value)
            continue
        flag = flag if flag in own else flag.replace("_", "-")
        found = _row(flag, own)
        arity = found[1] if found else "one" if own.get(flag) else "switch"
        values = [value] if equals else list(_values(arity, left))
        if found is None:
            moved.words.append(f"{flag}={values[0]}" if values else flag)
        else:
            moved.is_foreign |= flag not in own
            _take(moved, flag, values, *found)
    return moved


def _row(flag: str, own: Mapping[str, bool]) -> tuple[OtherOption, Arity] | None:
    name = flag.partition(".")[0]  # of a field within an option's JSON
    on = "--" + name.removeprefix("--no-")
    return None if name in own and name not in FLAGS else find(name) or find(on)


def _values(arity: Arity, left: list[str]) -> Iterator[str]:
    most = {"switch": 0, "one": 1}.get(arity, len(left))
    while most and left and not re.match(r"-(?!\d)", left[0]):
        most -= 1
        yield left.pop(0)


def _take(moved: Moved, flag: str, values: list[str], row: OtherOption, arity: Arity) -> None:
    is_off = find(flag.partition(".")[0]) is None
    if row.kind == "void":
        moved.notes.append(f"{flag} has no effect here: {row.why}".replace("`", ""))
    elif row.kind == "refused":
        if not (is_off or values and {*values} <= {*row.harmless}):
            raise OptionError(f"{flag}: {row.why}".replace("`", ""))
    elif arity == "switch":
        moved.words += [] if is_off else [row.to]
    elif not values:
        raise OptionError(f"{flag} needs a value")
    elif row.to == "--keys-file":
        moved.api_keys += values
    elif row.to == "MODEL":
        moved.words.insert(0, values[0])
    elif not row.to.startswith("--"):
        moved.environ[row.to] = values[0]
    else:
        try:
            read = [ours for text in values for ours in _read(row.to, text)]
        except ValueError as error:
            raise OptionError(f"{flag}: {error}") from None
        moved.words += [f"{row.to}={value}" for value in read if value]


def _read(to: str, text: str) -> Sequence[str]:
    if to == "--adapter" and text.lstrip().startswith(("{", "[")):
        found = json.loads(text)
        return [_adapter(entry) for entry in (found if isinstance(found, list) else [found])]
    if to == "--cors-origin" and text.startswith("["):
        return [str(origin) for origin in json.loads(text)]
    if to in _COUNTED:
        return [_count(text)]
    return [_RENAMED.get(text, text) if to in ("--dtype", "--kv-dtype", "--quantize") else text]


def _count(text: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if found is None:
        return "" if text in ("auto", "-1") else text
    unit = 1000 if found[2].islower() else 1024
    return str(int(float(found[1]) * unit ** ("kmgt".index(found[2].lower()) + 1)))


def _adapter(entry: object) -> str:
    fields = dict(entry) if isinstance(entry, dict) else {}
    fields.pop("base_model_name", None)
    name, path = (fields.pop(k, None) or fields.pop(f"lora_{k}", None) for k in ("name", "path"))
    if any(fields.values()) or not (name and path):
        raise ValueError(f"expected name and path alone, got {entry!r}; see --adapters-file")
    return f"{name}={path}"
