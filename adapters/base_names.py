"""Compares names of base models: quantised copies, mirrors and paths mean the same base. Pure.

A model's name is the last component of an id or path. Hubs, trainers and quantisers spell it in
different ways and add marks to its end; `normal_name` takes all that off. What distinguishes models
(`Instruct`, `v0.2`, `3.1`, `Coder`, `8B`, `1M`) stays.
"""

import re
from collections.abc import Iterable, Iterator

# How Hugging Face's cache names the folder of `owner/name`.
_HUB_CACHE = re.compile(r"(?:^|/)models--(?:[^/]+--)?(?P<name>[^/]+?)(?=/|$)")
_HUB_ID = re.compile(r"[^/\\]+/[^/\\]+")
# ModelScope's cache writes a dot so.
_CACHED_DOT = "___"
# Words, numbers with what follows them (`8b`), and sizes: `3.8b` is not `3-8b`.
_PARTS = re.compile(r"[0-9]+\.[0-9]+[bm](?![^\W_])|[0-9][^\W_]*|[^\W_0-9]+")

# Marks of a copy of the same weights, as `_PARTS` splits them.
_MARKS = (
    # Who quantised it, or with what.
    r"unsloth|bnb|bitsandbytes|awq|gptq|gptqmodel|autoawq|autogptq|auto-?round|hqq|marlin|exl-[23]",
    r"torchao|quantized",
    # Bits and number formats.
    r"[2-8]-?bits?|(?:16|32)-?bits?|int-[2-8]|w-[0-9]{1,2}a[0-9]{1,2}|[0-9]{2,3}g|g-[0-9]{2,3}",
    r"(?:nf|fp|nvfp|mxfp)-[48](?:-(?:dynamic|static|block|kv))?|(?:bf|f|fp|float|bfloat)-(?:16|32)",
    # File formats, and how the weights are cut into files.
    r"gguf|ggml|mlx|hf|safetensors",
    r"(?:(?:re)?sharded|(?:small-)?shards)(?:-(?:bf|f|fp)-(?:16|32))?(?:-(?:max-)?[0-9]+(?:gb)?)?",
    # Where a copy is meant to be loaded, and that it is one.
    r"(?:for-|free-|google-)?colab|copy|mirror|ungated",
)
_MARKED = re.compile(rf"(?:-(?:{'|'.join(_MARKS)}))+$")
_OPTIONAL_MAKER = re.compile(r"^(?:meta-)+(?=llama-)")
# What says nothing of a model's family: numbers, sizes, commits, folders of any training.
_NO_NAME = re.compile(
    r"|[0-9].*|[0-9a-f-]{40,}|snapshots?|checkpoints?(?:-[0-9]+)?|main|master|final|latest|outputs?"
    r"|merged|transformers|pytorch|default"
)


def names_base(name: str, known: Iterable[str]) -> bool:
    """Whether a config's `base_model_name_or_path` means the base that has the names `known`.

    A config that names none leaves it to the shapes.
    """
    if not name:
        return True
    names, wanted = set(known), normal_name(name)
    return name in names or (bool(wanted) and any(wanted in _spellings(each) for each in names))


def normal_name(name: str) -> str:
    """The model's own name within an id or path, without what copies of one model differ in.

    Empty when the last component says nothing of a model: `1`, `8b-chat`, a commit, `checkpoint`.
    """
    path = name.strip().replace("\\", "/").rstrip("/")
    cached = _HUB_CACHE.search(path)
    own = cached["name"] if cached else path.rpartition("/")[2]
    text = own.partition("@")[0].casefold().replace(_CACHED_DOT, ".")
    found = _OPTIONAL_MAKER.sub("", _MARKED.sub("", "-".join(_PARTS.findall(text))))
    return "" if _NO_NAME.fullmatch(found) else found


def _spellings(known: str) -> Iterator[str]:
    """Of `owner/name` also what tools make of it for a folder: `owner_name`, `owner--name`."""
    yield normal_name(known)
    if _HUB_ID.fullmatch(known):
        yield normal_name(known.replace("/", "_"))
