"""Finds the file with an adapter's weights in a folder, and its format. Pure.

What is not converted is refused by the name of what it is.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import msgspec

from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import MLX_FILE, did_you_mean, is_unsafe
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.violations import shown
from loraplex.launcher.convert.plan import Form, refusal

_PICKLE_FILE = "adapter_model.bin"
# The first that is there holds the weights.
ADAPTER_FILES = (WEIGHTS_FILE, MLX_FILE, _PICKLE_FILE)
_LLAMA = "ggml-adapter"
_MOST_NAMED = 8
_CHECKPOINT = re.compile(r"\d+_adapters\.safetensors")
# What trainers leave beside the weights.
_STATE = re.compile(
    r"(optimizer\w*|scheduler\w*|scaler|sampler\w*|rng_state\w*|random_states_\w+|training_args"
    r"|trainer_state|\w*mp_rank_\w+|\w*optim_states)\.(pt|pth|bin|pkl|pickle)",
    re.I,
)
_WHOLE_MODEL = re.compile(
    r"(pytorch_model|model|consolidated)([.-]\d[\w.-]*)?\.(bin|pt|pth|safetensors)(\.index\.json)?"
)
_SHARD = re.compile(r"adapter_model.*-of-\d+\.\w+|adapter_model\.\w+\.index\.json")
_MLX_TENSOR = re.compile(r".+\.lora_[ab]")
_PEFT_TENSOR = re.compile(r".+\.lora_(?:[AB]\.(?:\w+\.)?weight|embedding_[AB](?:\.\w+)?)")
_IMAGES = re.compile(
    r"(?:lora_|unet\.|text_encoder|.*\.lora_(?:down|up)\."
    r"|.*(?:transformer_|down_|up_|mid_|single_|double_)blocks?\..*lora).*"
)
# The first pattern that a tensor's name matches decides the file's format.
_OTHERS = (
    (re.compile(r".+\.lora_[ab]\.weight"), "torchtune's own format: save it there as PEFT's"),
    (
        re.compile(r".+\.lora_[AB]"),
        "loralib's or litgpt's format: load it there, save it with PEFT",
    ),
    (re.compile(r".+\.(?:hada|lokr|oft)_.+"), "no LoRA but LoHa, LoKr or OFT"),
    (re.compile(r".*(?:prompt_embeddings|ia3_l).*"), "no LoRA but another method of PEFT"),
    (re.compile(r".+\.(?:weight|bias)"), "a whole model and no adapter"),
)


class Listing(msgspec.Struct, frozen=True):
    """The files of an adapter to convert. A folder. files: names of its files. folders: those of
    its folders that hold adapters.

    place: the folder's own path, for messages.
    """

    files: Collection[str]
    folders: Sequence[str] = ()
    place: str = "."


def choose_weights(listing: Listing, wanted: str | None = None) -> str:
    """The file that holds the weights. wanted: the one that the user named. Raises AdapterError:
    there is none, there are several, or they are of a known other kind."""
    name = _choose(listing, wanted)
    if not (name.isascii() and name.isprintable()):
        raise refusal(f"the weights file is called {shown(name)}: give it a plain name")
    return name


def beside(listing: Listing, chosen: str) -> str | None:
    """A note on the weights that were not chosen, if there are any."""
    others = [name for name in listing.files if is_weights(name) and not _STATE.fullmatch(name)]
    others = [name for name in others if name != chosen]
    return f"not used: {_named(others)}; --weights FILE takes another" if others else None


def is_weights(name: str) -> bool:
    """Whether it may hold an adapter's weights. llama.cpp's first format looks like a pickle."""
    is_llama = name.startswith(_LLAMA)
    return name.endswith(".safetensors") or (is_unsafe(name) and not is_llama)


def form_of(names: Sequence[str]) -> Form:
    """The format that the names show. Raises AdapterError for one that is not converted."""
    if not names:
        raise refusal("the weights file has no tensors")
    if any(map(_MLX_TENSOR.fullmatch, names)):
        return "mlx-lm"
    if any(map(_IMAGES.fullmatch, names)):
        raise refusal(f"this is a LoRA for images (tensor {shown(names[0])})")
    if any(map(_PEFT_TENSOR.fullmatch, names)):
        return "PEFT"
    for pattern, what in _OTHERS:
        if any(map(pattern.fullmatch, names)):
            raise refusal(f"this is {what} (tensor {shown(names[0])})")
    raise refusal(f"the weights have no LoRA tensors but {_named(names)}")


def refuse_ready(weights: str, form: Form, config: Mapping[str, object]) -> None:
    """Refuses what PEFT saved as safetensors: it needs no conversion. Raises AdapterError."""
    if form == "PEFT" and weights == WEIGHTS_FILE and "peft_type" in config:
        raise refusal("nothing to convert: this is PEFT's format already; serve it as it is")


def _choose(listing: Listing, wanted: str | None) -> str:
    files = listing.files
    if wanted is not None:
        if wanted not in files:
            raise refusal(f"--weights {shown(wanted)}: there is no such file in the folder")
        return wanted
    for name in ADAPTER_FILES:
        if name in files:
            return name
    _refuse_shards(files)
    weights = [name for name in files if is_weights(name) and not _STATE.fullmatch(name)]
    found = [name for name in weights if not _WHOLE_MODEL.fullmatch(name)]
    if not found:
        _refuse_other_files(listing)
    if len(found) > 1 or _CHECKPOINT.fullmatch(found[0]):
        raise refusal(
            f"no {MLX_FILE} and no {_PICKLE_FILE}, but {_named(found)}: choose with --weights"
        )
    return found[0]


def _refuse_shards(files: Collection[str]) -> None:
    shards = sorted(filter(_SHARD.fullmatch, files))
    if any(".safetensors" in name for name in shards):
        raise refusal("nothing to convert: safetensors in several files are served as they are")
    if shards:
        raise refusal(
            f"the weights are in several files ({_named(shards)}), which are not converted: load "
            "the adapter with PEFT and save it again"
        )


def _refuse_other_files(listing: Listing) -> NoReturn:
    """Refuse a folder without a file that may be an adapter's weights."""
    for name in sorted(listing.files):
        if name.lower().endswith((".gguf", ".ggla")) or name.startswith(_LLAMA):
            raise refusal(f"{shown(name)} is llama.cpp's format, which is not converted")
        if name.endswith(".npz"):
            raise refusal(
                f"{shown(name)} is mlx's format before April 2024, which is not converted: load "
                f"it with mlx and save it as {MLX_FILE}, with an {CONFIG_FILE}"
            )
    if listing.folders:
        meant = did_you_mean(listing.place, listing.folders)
        raise refusal(f"the folder itself holds no adapter{meant}")
    whole = [name for name in listing.files if _WHOLE_MODEL.fullmatch(name)]
    if whole:
        raise refusal(f"{_named(whole)}: a whole model and no adapter")
    raise refusal("the folder has no weights of an adapter")


def _named(names: Collection[str]) -> str:
    """The first few of many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
    return ", ".join(map(shown, ordered[:_MOST_NAMED])) + more
