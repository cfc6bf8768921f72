"""Finds the file with an adapter's weights in a folder, and turns mlx-lm's adapters into PEFT's.
Pure.

What is not converted is refused by the name of what it is. mlx-lm multiplies `scale * (x @ lora_a)
@ lora_b`, with lora_a `[in, r]` and lora_b `[r, out]`; PEFT `lora_alpha / r * (x @ A.T) @ B.T`.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.errors import shown
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import MLX_FILE, did_you_mean, is_unsafe
from loraplex.adapters.peft.tensor_names import NAMINGS, meant_by_any
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.launcher.convert.plan import ConversionPlan, Form, Move, refusal

PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(?P<layer>0|[1-9]\d{0,5})\.(?P<rest>.+)")

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

_SIDE = re.compile(r"(?P<path>.+)\.lora_(?P<side>[ab])")
_EMBEDDING = "embed_tokens"
_HEAD = "lm_head"
_WITH_FACTORS = "falcon-h1"
# Modules of Falcon-H1 that few others have, and what it has not.
_OF_FACTORS = re.compile(r"\.mamba\.|\.feed_forward\.(gate|up|down)_proj\.")
_NOT_OF_FACTORS = ".mlp."
_MAX_NUMBER = 1e30
_READ_BY_MLX = frozenset({"rank", "scale", "dropout", "keys"})


def lora_config(base_name: str, ranks: Mapping[str, int], scale: float) -> dict[str, Any]:
    """`adapter_config.json`. ranks: of each module. scale: what B A x is multiplied with."""
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: each for path, each in ranks.items() if each != rank}
    targets, layers = _targets(ranks)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": _alpha(scale, rank),
        "rank_pattern": others,
        "alpha_pattern": {path: _alpha(scale, each) for path, each in others.items()},
        "target_modules": targets,
        "layers_to_transform": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def within_layer(path: str) -> tuple[int, str] | None:
    """The layer of a module, and the module's name in the layer; None = it is in no layer."""
    found = _LAYER.fullmatch(path)
    return None if found is None else (int(found["layer"]), found["rest"])


def _alpha(scale: float, rank: int) -> float | int:
    alpha = scale * rank
    return int(alpha) if float(alpha).is_integer() else alpha


def _targets(paths: Collection[str]) -> tuple[list[str], list[int] | None]:
    """The `target_modules` and `layers_to_transform` that name these modules alone."""
    places = {place for place in map(within_layer, paths) if place is not None}
    layers = sorted({layer for layer, _ in places})
    rests = {rest for _, rest in places}
    names = sorted({rest.rpartition(".")[2] for rest in rests})
    is_whole = len(places) == len(paths) == len(layers) * len(rests)
    if is_whole and len(names) == len(rests):
        return names, layers
    return sorted(paths), None


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


class MlxOptions(msgspec.Struct, frozen=True):
    """Facts that the files lack, or state wrongly.

    scale: what the product is multiplied with. base_name: of the base. ties_head: whether the
    base's head is its embedding; None = not known.
    """

    scale: float | None = None
    base_name: str | None = None
    ties_head: bool | None = None


class _Module(msgspec.Struct, frozen=True):
    """One module. a: `[in, rank]`, of an embedding `[vocabulary, rank]`. b: `[rank, out]`."""

    path: str
    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.b.shape[0]

    @property
    def is_embedding(self) -> bool:
        return self.path.rpartition(".")[2] == _EMBEDDING


def is_mlx_config(config: Mapping[str, Any]) -> bool:
    return "lora_parameters" in config or "fine_tune_type" in config


def check_kind(config: Mapping[str, Any]) -> None:
    """Checks that it is plain LoRA. Raises AdapterError for what else mlx-lm trains."""
    kind = config.get("fine_tune_type") or ("dora" if config.get("use_dora") else "lora")
    if kind == "dora":
        raise refusal(
            "DoRA (fine_tune_type) is not converted: fuse it into its base, or train LoRA"
        )
    if kind == "full":
        raise refusal(
            "fine_tune_type is full: its tensors replace weights of the base; fuse them into a "
            "base of its own"
        )
    if kind != "lora":
        raise refusal(f"fine_tune_type is {shown(kind)}; only lora is converted")


def check_factors(
    config: Mapping[str, Any], tensors: Sequence[TensorInfo], base: BaseSpec | None
) -> tuple[str, ...]:
    """Checks that mlx-lm's base is the one that is served. Raises AdapterError for Falcon-H1: there
    mlx-lm multiplies factors of products into matrices, which LoRA beside them has not, and leaves
    others out. base: None = not known. Returns a note where neither base nor names tell.
    """
    layers = () if base is None else base.layers
    has_both = any({"in", "qkv"} <= layer.sites.keys() for layer in layers)
    if has_both or _WITH_FACTORS in str(config.get("model")).casefold():
        raise refusal(
            "mlx-lm multiplies factors of Falcon-H1 (ssm_multipliers, ...) into its matrices: LoRA"
            " trained beside these is not LoRA of the base; train it with PEFT"
        )
    names = [tensor.name for tensor in tensors]
    named = next((name for name in names if _OF_FACTORS.search(name)), None)
    if base is None and named is not None:
        raise refusal(
            f"{named}: mlx-lm changes factors of Falcon-H1, but not of other bases with such"
            " modules; --base MODEL shows which it is"
        )
    if base is not None or any(_NOT_OF_FACTORS in name for name in names):
        return ()
    return (
        "not checked: whether the base is Falcon-H1, where mlx-lm's LoRA is none of the base;"
        " --base MODEL shows it",
    )


def plan_mlx(
    config: Mapping[str, Any], tensors: Sequence[TensorInfo], options: MlxOptions
) -> ConversionPlan:
    """Plans how an adapter of mlx-lm becomes one of PEFT. Raises AdapterError for what has no equal
    in PEFT's format, or is not said by the files.
    """
    check_kind(config)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise refusal("adapter_config.json has no lora_parameters, as mlx-lm writes them")
    modules = _modules(tensors)
    _check_keys(parameters.get("keys"), modules)
    scale = _scale(config, parameters, options.scale)
    heads = {_head_beside(module.path): module for module in _tied(modules, options.ties_head)}
    ranks = {module.path: module.rank for module in modules}
    ranks |= {path: module.rank for path, module in heads.items()}
    name = options.base_name or config.get("model") or config.get("base_model_name_or_path") or ""
    if not isinstance(name, str):
        raise refusal(f"model: expected the base's name, got {shown(name)}")
    dropout = parameters.get("dropout")
    made = lora_config(name, ranks, scale)
    made["lora_dropout"] = dropout if _is_number(dropout) else 0.0
    notes = _notes(config, parameters, modules, name)
    if heads:
        notes.append("the head is tied to embed_tokens: what adapts the one adapts the other")
    moves = [move for module in modules for move in _moves(module)]
    moves += [move for path, module in heads.items() for move in _moves_of_head(path, module)]
    return ConversionPlan("mlx-lm", json.dumps(made, indent=2).encode(), tuple(moves), tuple(notes))


def _modules(tensors: Sequence[TensorInfo]) -> list[_Module]:
    """Find pairs that fit each other, in the order of the file."""
    sides: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        found = _SIDE.fullmatch(tensor.name)
        if found is None:
            raise refusal(_unknown(tensor.name))
        sides.setdefault(found["path"], {})[found["side"]] = tensor
    modules = []
    for path, pair in sides.items():
        if len(pair) != 2:
            raise refusal(f"{path} has lora_{next(iter(pair))} and not the other of the pair")
        modules.append(_checked(_Module(path, pair["a"], pair["b"])))
    return modules


def _unknown(name: str) -> str:
    if name.endswith(".m"):
        return f"{name}: DoRA is not converted: fuse it into its base, or train LoRA"
    if name.endswith(("_scales", "_biases")):
        return f"{name}: the adapter itself is quantised, which is not converted"
    return f"{name} is no tensor of LoRA: it would replace a weight of the base"


def _checked(module: _Module) -> _Module:
    a, b = module.a.shape, module.b.shape
    if len(a) == 3 or "switch_mlp" in module.path:
        raise refusal(f"{module.path}: LoRA of experts has no equal in PEFT's format")
    if len(a) != 2 or len(b) != 2 or a[1] != b[0] or not all((*a, *b)):
        shapes = f"lora_a {list(a)} and lora_b {list(b)}"
        raise refusal(f"{module.path}: {shapes} do not fit: expected [in, r] and [r, out]")
    return module


def _check_keys(keys: object, modules: Sequence[_Module]) -> None:
    """Checks that the config names every module with tensors: mlx-lm loads no tensor of another."""
    if keys is None:
        return
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise refusal(f"lora_parameters.keys: expected a list of names, got {shown(keys)}")
    for module in modules:
        if not {module.path, _rest(module.path)} & set(keys):
            raise refusal(
                f"lora_parameters.keys does not name {_rest(module.path)}, so that mlx-lm leaves "
                f"the tensors of {module.path} out; correct the list, or remove it"
            )


def _meant(path: str) -> str:
    """A module's name in a model for text alone; mlx-lm has some within larger models."""
    return meant_by_any(path) or path


def _rest(path: str) -> str:
    """A module's name within its layer."""
    place = within_layer(_meant(path))
    return path if place is None else place[1]


def _scale(config: Mapping[str, Any], parameters: Mapping[str, Any], given: float | None) -> float:
    if given is not None:
        return given
    scale, alpha, rank = (parameters.get(key) for key in ("scale", "alpha", "rank"))
    if not _is_number(scale):
        raise refusal(
            f"lora_parameters.scale: expected a number, got {shown(scale)}; --scale NUMBER says it"
        )
    # The key is of April to September 2024. In June of it `scale` lost the factor alpha / rank.
    is_old = "lora_layers" in config and "num_layers" not in config
    if is_old and _is_number(alpha) and _is_number(rank) and rank and alpha != rank:
        raise refusal(
            f"this is of an mlx-lm of 2024, to which scale {scale:g} meant {scale:g} from June on "
            f"and {scale * alpha / rank:g} before (scale * alpha / rank): --scale NUMBER says which"
        )
    return float(scale)


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MAX_NUMBER < value < _MAX_NUMBER


def _tied(modules: Sequence[_Module], ties_head: bool | None) -> list[_Module]:
    """Embeddings that mlx-lm adapts as the head, too, because they are it."""
    embeddings = [module for module in modules if module.is_embedding]
    has_head = any(_meant(module.path) == _HEAD for module in modules)
    if has_head and ties_head:
        raise refusal(
            f"{_HEAD} has tensors, but the base ties it to its embedding: mlx-lm has none"
        )
    if has_head or not embeddings:
        return []
    if ties_head is None:
        raise refusal(
            f"{embeddings[0].path} is adapted: mlx-lm adapts the head with it where the base ties "
            "both; --base MODEL shows whether it does"
        )
    return embeddings if ties_head else []


def _head_beside(embedding: str) -> str:
    """The head's name in the model whose embedding has this name."""
    for naming in NAMINGS:
        if naming.spelled(f"model.{_EMBEDDING}") == embedding:
            return naming.spelled(_HEAD) or _HEAD
    return _HEAD


def _moves(module: _Module) -> list[Move]:
    names = ("embedding_A", "embedding_B") if module.is_embedding else ("A.weight", "B.weight")
    return [
        Move(f"{PREFIX}{module.path}.lora_{name}", source, is_transposed=True)
        for name, source in zip(names, (module.a, module.b), strict=True)
    ]


def _moves_of_head(path: str, embedding: _Module) -> list[Move]:
    """The head's pair: it multiplies from the other side, so that b is A and a is B."""
    return [
        Move(f"{PREFIX}{path}.lora_A.weight", embedding.b),
        Move(f"{PREFIX}{path}.lora_B.weight", embedding.a),
    ]


def _notes(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    modules: Sequence[_Module],
    base_name: str,
) -> list[str]:
    notes = []
    places = [within_layer(_meant(module.path)) for module in modules]
    layers = {place[0] for place in places if place is not None}
    said = config.get("num_layers", config.get("lora_layers"))
    if isinstance(said, int) and 0 < said < len(layers):
        notes.append(f"num_layers is {said}, the tensors are of {len(layers)} layers: all count")
    ranks, named = sorted({module.rank for module in modules}), parameters.get("rank")
    if ranks != [named]:
        notes.append(f"rank is {shown(named)}, the tensors' {ranks} count")
    unread = sorted(parameters.keys() - _READ_BY_MLX)
    if unread:
        notes.append(f"mlx-lm does not read {', '.join(map(shown, unread))} of lora_parameters")
    if not base_name:
        notes.append("the files do not name the base; --base-name NAME does")
    return notes
