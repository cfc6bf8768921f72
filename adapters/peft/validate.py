"""Judges an adapter's config and tensors against a base model; nothing unknown is ignored. Pure.

The result holds what PEFT would have loaded. Where PEFT drops a tensor with a warning, or changes
the base, the adapter is refused by name.
"""

import re
from collections.abc import Iterable, Iterator, Set

import msgspec

from loraplex.adapters.base import BaseSpec, base_modules
from loraplex.adapters.errors import Findings, shown
from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.peft.config import MAX_RANK, PeftConfig
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora
from loraplex.adapters.peft.own_weights import (
    check_head,
    check_norms,
    check_others,
    check_tables,
    own_head,
    score_parts,
    tensors_of_norms,
    whole_tables,
)
from loraplex.adapters.peft.placing import ModulePlacer
from loraplex.adapters.peft.sorted_tensors import sort_tensors
from loraplex.adapters.peft.targeting import Targeting, check_parameters, targeted_paths
from loraplex.adapters.peft.tensor_names import NAMINGS, parse_tensor_name
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.safetensors.header import WEIGHTS_FILE as WEIGHTS_FILE

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
MAX_ADAPTER_BYTES = 4 << 30
MAX_LORA_RANK = 256
MAX_TABLE_BYTES = 2 << 30
MAX_STORE_BYTES = 200 << 30


class SlabRoom(msgspec.Struct, frozen=True):
    """The memory that packed adapters are served from. An adapter must fit into each part alone.

    device_bytes, host_bytes: options `adapter_memory` and `host_adapter_memory`.
    """

    dtype: SlabDtype
    extent_bytes: int
    device_bytes: int
    host_bytes: int


class AdapterLimits(msgspec.Struct, frozen=True):
    """Limits that the operator sets.

    max_bytes: of one adapter's files. max_table_bytes: of an embedding or a head in it.
    max_store_bytes: of a store's content and slabs together.
    allow_other_base: accept a config that names another base model, if the shapes fit.
    text_part_only: of an adapter of a model for text and images, serve the text part.
    room: None = the packed size is not limited.
    """

    max_bytes: int = MAX_ADAPTER_BYTES
    max_lora_rank: int = MAX_LORA_RANK
    allow_other_base: bool = False
    max_store_bytes: int = MAX_STORE_BYTES
    room: SlabRoom | None = None
    max_table_bytes: int = MAX_TABLE_BYTES
    text_part_only: bool = False


def validate(
    config: PeftConfig,
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
) -> LoraTensors | None:
    """The adapter's tensors in place; None when the config leaves the places open. Worth nothing
    unless `findings` is still empty afterwards."""
    targeting = check_config(config, base, limits, findings)
    return place_tensors(targeting, tensors, base, limits, findings)


def place_tensors(
    matcher: Targeting | None,
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
) -> LoraTensors | None:
    """Places tensors, as `validate` does. matcher: of a checked config; None = none is readable."""
    before, base = len(findings), _part(base, limits)
    own = frozenset[str]() if matcher is None else whole_modules(matcher.config, base)
    found = sort_tensors(tensors, base, findings, own, text_part_only=limits.text_part_only)
    if not found.pairs and len(findings) == before:
        findings.add("no_tensors", WEIGHTS_FILE, "the weights file has no LoRA tensors")
    if matcher is None or not matcher.is_sound:
        return None
    placer = ModulePlacer(matcher, found, base, limits.max_lora_rank, findings)
    _check_targets(matcher.config, placer.targeted.keys(), base, findings)
    placed = placer.place()
    if not all(isinstance(lora, ModuleLora) for lora in placed.modules):
        _check_experts(matcher.config, findings)
    for table in placed.tables:
        name, nbytes = table.tensor.name, table.tensor.nbytes
        if nbytes > limits.max_table_bytes:
            most = f"at most {limits.max_table_bytes} are served (option max_table_bytes)"
            findings.add("table_too_large", name, f"{name}: {nbytes} bytes; {most}")
    return placed


def _part(base: BaseSpec, limits: AdapterLimits) -> BaseSpec:
    """The part of the base that an adapter may change."""
    return base.text_part if limits.text_part_only else base


def whole_modules(config: PeftConfig, base: BaseSpec) -> frozenset[str]:
    """Short names of tables that may come whole; of norms and score heads names of tensors."""
    head = () if own_head(config, base) == "none" else dict(score_parts(config, base).tensors)
    return whole_tables(config, base).union(head, tensors_of_norms(config, base))


def check_config(
    config: PeftConfig, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> Targeting:
    """Checks of a config before there are tensors, which show whose names it means."""
    base = _part(base, limits)
    check_base_name(config.base_model_name_or_path, base, limits, findings)
    matcher = Targeting(config, findings)
    if not matcher.is_sound:
        return matcher
    if not any(_all_targeted(matcher, base)) and any(base_modules(base)):
        key = "target_modules" if config.target_modules else "target_parameters"
        findings.add("unknown_target", key, f"{key} match no module of the base model")
    check_parameters(config.target_parameters, base, findings)
    _check_rank(matcher, base, limits, findings)
    check_head(config, base, findings)
    check_norms(config, base, findings)
    check_others(config, base, findings)
    return matcher


def _check_targets(config: PeftConfig, paths: Set[str], base: BaseSpec, findings: Findings) -> None:
    """Checks what a config says of the modules that it targets. paths: of these."""
    if config.alora_invocation_tokens:
        _check_activation(config, paths, base, findings)
    if config.use_dora or config.lora_bias or config.bias != "none":
        _check_outputs(config, paths, base, findings)
    if config.modules_to_save or config.trainable_token_indices:
        check_tables(config, paths, base, findings)


def _check_outputs(config: PeftConfig, paths: Set[str], base: BaseSpec, findings: Findings) -> None:
    """Refuses what PEFT does not load, or cannot confine to the tokens of activated LoRA."""
    embed = base.model_modules.get("embed_tokens")
    is_activated = bool(config.alora_invocation_tokens)
    scaled = (each.path for each in base_modules(base) if each.shape.factor_behind)
    unserved = {
        ("use_dora", "alora_invocation_tokens"): config.use_dora and is_activated,
        ("lora_bias", "use_dora"): config.lora_bias and config.use_dora,
        ("lora_bias", "embed_tokens targeted"): config.lora_bias
        and embed is not None
        and embed.path in paths,
        ("lora_bias", "modules targeted whose inputs have a factor"): config.lora_bias
        and not paths.isdisjoint(scaled),
        ("bias", "alora_invocation_tokens"): config.bias != "none" and is_activated,
    }
    for (key, words), is_there in unserved.items():
        if is_there:
            message = f"{key} with {words} is not supported"
            findings.add("unsupported_feature", key, message)


def _check_experts(config: PeftConfig, findings: Findings) -> None:
    """Refuses beside LoRA of experts what PEFT has for linear modules alone. That a config targets
    experts says little: models of transformers 5 have no modules of theirs."""
    keys = {
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "alora_invocation_tokens": bool(config.alora_invocation_tokens),
    }
    for key in (key for key, is_there in keys.items() if is_there):
        message = f"{key} with LoRA on experts is not supported"
        findings.add("unsupported_feature", key, message)


def _check_activation(
    config: PeftConfig, paths: Set[str], base: BaseSpec, findings: Findings
) -> None:
    """Refuses what an activated LoRA may not change. PEFT switches linears alone on with the
    invocation: what else it changes acts on all tokens.
    """
    key = "alora_invocation_tokens"
    unknown = [i for i in config.alora_invocation_tokens if i >= base.vocab_size]
    if unknown and not base.is_inferred:
        findings.add("bad_value", key, f"{key}: {unknown[0]} is no token of the base model")
    embed = base.model_modules.get("embed_tokens")
    if embed is not None and embed.path in paths:
        message = f"{key} with embed_tokens targeted is not supported"
        findings.add("unsupported_feature", key, message)
    if any(path.endswith(".kv_b_proj") for path in paths):
        # One query sees keys with the adapter and without; kv_b may be absorbed in queries.
        message = f"{key} with kv_b_proj targeted is not supported"
        findings.add("unsupported_feature", key, message)
    of_tower = (each.path for each in base_modules(base) if base.is_of_tower(each.layer))
    if not paths.isdisjoint(of_tower):
        message = f"{key} with modules of the part for images targeted is not supported"
        findings.add("unsupported_feature", key, message)


def check_base_name(
    trained_for: str, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> None:
    if limits.allow_other_base or names_base(trained_for, base.names):
        return
    known = " or ".join(map(shown, base.names)) or "unnamed"
    unnamed = "" if normal_name(trained_for) else ", a path that does not end in a model's name"
    message = (
        f"the adapter was trained for {shown(trained_for)}{unnamed}; this base model is {known}. "
        "If both are the same model, --model-name adds the adapter's spelling to the base's names; "
        "--allow-other-base takes any name"
    )
    findings.add("wrong_base", "base_model_name_or_path", message)
    findings.trained_for = trained_for


def may_be_lora(tensor: TensorInfo) -> bool:
    """Whether its values count, judged by its name and dtype."""
    if tensor.dtype not in FLOAT_DTYPES:
        return False
    name = parse_tensor_name(tensor.name)
    return name is not None and (bool(name.side) or name.is_bias or name.is_rows)


def is_of_outputs(tensor: TensorInfo) -> bool:
    """Whether it has a number for each output of a module, which stays float32."""
    name = parse_tensor_name(tensor.name)
    return name is not None and name.is_of_outputs


def _all_targeted(matcher: Targeting, base: BaseSpec) -> Iterator[dict[str, str]]:
    """Yields targets under every naming, lazily: the first is enough for most adapters."""
    return (targeted_paths(matcher, base, naming) for naming in NAMINGS)


def _check_rank(
    matcher: Targeting, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> None:
    lowest = MAX_RANK + 1
    for targeted in _all_targeted(matcher, base):
        lowest = min((lowest, *map(matcher.lora_rank, targeted.values())))
        if lowest <= limits.max_lora_rank:
            return
    if lowest <= MAX_RANK:
        message = f"rank {lowest} or more everywhere; at most {limits.max_lora_rank} is served"
        findings.add("rank_too_large", "r", message)


def names_base(name: str, known: Iterable[str]) -> bool:
    """Whether a config's `base_model_name_or_path` means the base that has the names `known`. A
    config that names none leaves it to the shapes."""
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
    """Yields a name's normal forms; tools spell folders of `owner/name` as `owner_name`."""
    yield normal_name(known)
    if _HUB_ID.fullmatch(known):
        yield normal_name(known.replace("/", "_"))
