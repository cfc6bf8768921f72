"""Which files of a source make an adapter, judged by name and size before any is fetched. Pure."""

from collections.abc import Callable, Mapping, Sequence

from adapters.errors import AdapterError
from adapters.peft_format import CONFIG_FILE, MAX_CONFIG_BYTES
from adapters.run_folders import did_you_mean
from adapters.tokenizer_files import TOKENIZER_FILES
from adapters.validate import WEIGHTS_FILE, AdapterLimits
from adapters.violations import Findings

# Of weights in several files. It is not read.
_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# Of mlx-lm's format. It is not read.
MLX_FILE = "adapters.safetensors"
_CONVERT = "`loraplex adapter convert FOLDER --out OUT` makes a safetensors adapter of it"
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_unsafe(name: str) -> bool:
    """Whether the name is that of a pickle: refused when it stands in for weights, never opened."""
    return name.lower().endswith(_UNSAFE_SUFFIXES)


def is_relevant(name: str) -> bool:
    """Whether it says something of the adapter, be it only why it is refused."""
    return _is_fetched(name) or name in (_INDEX_FILE, MLX_FILE) or is_unsafe(name)


def _is_fetched(name: str) -> bool:
    return name in (CONFIG_FILE, WEIGHTS_FILE) or name in TOKENIZER_FILES


def small_files(
    listing: Mapping[str, int],
    limits: AdapterLimits,
    findings: Findings,
    place: str = "",
    nearby: Callable[[], Sequence[str]] = tuple,
) -> tuple[str, ...]:
    """The files to look at before the weights: those that are there and not too large.

    listing: name -> bytes. place: what is listed, as it may be told. nearby: names of folders in it
    that are adapters, asked for where it is none itself. What is missing or too large is added to
    `findings`. Raises AdapterError `too_large` when the files together exceed the limit.
    """
    if CONFIG_FILE not in listing:
        meant = did_you_mean(place, nearby())
        findings.add("missing_file", CONFIG_FILE, f"there is no {CONFIG_FILE}{meant}")
    if WEIGHTS_FILE not in listing:
        unsafe = sorted(name for name in listing if is_unsafe(name))
        if _INDEX_FILE in listing:
            message = f"the weights are in several files; save them as one, {WEIGHTS_FILE}"
            findings.add("missing_file", WEIGHTS_FILE, message)
        elif unsafe:
            message = f"the weights are a pickle, which is never opened; {_CONVERT}"
            findings.add("unsafe_format", unsafe[0], message)
        elif MLX_FILE in listing:
            message = f"the weights are in mlx-lm's format, which is not served; {_CONVERT}"
            findings.add("missing_file", MLX_FILE, message)
        else:
            findings.add("missing_file", WEIGHTS_FILE, f"there is no {WEIGHTS_FILE}")
    allowed = {CONFIG_FILE: MAX_CONFIG_BYTES, **TOKENIZER_FILES}
    small: list[str] = []
    for name, most in allowed.items():
        if listing.get(name, 0) > most:
            message = f"{name} has {listing[name]} bytes; at most {most} are read"
            findings.add("file_too_large", name, message)
        elif name in listing:
            small.append(name)
    check_bytes(fetched_bytes(listing), limits)
    return tuple(small)


def check_bytes(total: int, limits: AdapterLimits) -> None:
    """total: of an adapter's files together. Raises AdapterError `too_large`."""
    if total > limits.max_bytes:
        message = f"the adapter has {total} bytes; at most {limits.max_bytes} are accepted"
        raise AdapterError("too_large", message)


def fetched_bytes(listing: Mapping[str, int]) -> int:
    return sum(size for name, size in listing.items() if _is_fetched(name))
