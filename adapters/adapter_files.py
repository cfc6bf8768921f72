"""Which files of a source make an adapter, judged by name and size before any is fetched. Pure."""

from collections.abc import Mapping

from adapters.errors import AdapterError
from adapters.peft_format import CONFIG_FILE, MAX_CONFIG_BYTES
from adapters.tokenizer_files import TOKENIZER_FILES
from adapters.validate import WEIGHTS_FILE, AdapterLimits
from adapters.violations import Findings

_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_unsafe(name: str) -> bool:
    """Whether the name is that of a pickle: refused when it stands in for weights, never opened."""
    return name.lower().endswith(_UNSAFE_SUFFIXES)


def is_relevant(name: str) -> bool:
    return name in (CONFIG_FILE, WEIGHTS_FILE) or name in TOKENIZER_FILES or is_unsafe(name)


def small_files(listing: Mapping[str, int], limits: AdapterLimits) -> tuple[str, ...]:
    """The files to fetch before the weights.

    listing: name -> bytes. Raises AdapterError: `invalid` when this is not an adapter that can be
    served, `too_large` when its files together exceed the limit.
    """
    findings = Findings()
    if CONFIG_FILE not in listing:
        findings.add("missing_file", CONFIG_FILE, f"there is no {CONFIG_FILE}")
    if WEIGHTS_FILE not in listing:
        unsafe = sorted(name for name in listing if is_unsafe(name))
        if unsafe:
            message = f"the weights are a pickle, which is never opened; expected {WEIGHTS_FILE}"
            findings.add("unsafe_format", unsafe[0], message)
        else:
            findings.add("missing_file", WEIGHTS_FILE, f"there is no {WEIGHTS_FILE}")
    allowed = TOKENIZER_FILES | {CONFIG_FILE: MAX_CONFIG_BYTES}
    small = tuple(name for name in allowed if name in listing)
    for name in small:
        if listing[name] > allowed[name]:
            message = f"{name} has {listing[name]} bytes; at most {allowed[name]} are read"
            findings.add("file_too_large", name, message)
    findings.raise_if_any()
    total = fetched_bytes(listing)
    if total > limits.max_bytes:
        message = f"the adapter has {total} bytes; at most {limits.max_bytes} are accepted"
        raise AdapterError("too_large", message)
    return small


def fetched_bytes(listing: Mapping[str, int]) -> int:
    return sum(size for name, size in listing.items() if is_relevant(name) and not is_unsafe(name))
