"""Reads `adapter_config.json` as PEFT writes it: what is used, and why it may be refused. Pure.

It does not look at tensors (`validate`) and does not match modules (`targeting`). Keys of PEFT's
LoraConfig and of trainers are of three kinds. *Used*: part of the maths that is served. *Harmless*:
no part of the result once trained. *Refused*: changes the maths in a way that is not implemented,
unless it has one of the values listed. A key in none of the three is refused too, unless its value
is empty.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from loraplex.adapters.classes import HEAD_OF_CLASSES, HEADS_OF_ENCODERS
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.errors import Findings, shown
from loraplex.adapters.peft.tensor_names import table_of

CONVERT = "`loraplex adapter convert` makes LoRA of it"
# What `loraplex adapter convert` turns into LoRA.
CONVERTED = frozenset(
    {
        "ADALORA",
        "BOFT",
        "C3A",
        "FOURIERFT",
        "HRA",
        "IA3",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "RANDLORA",
        "VBLORA",
        "VERA",
    }
)
# What PEFT itself turns into LoRA, with the whole base in memory.
_SAVED_AS_LORA = frozenset(
    {"DELORA", "GRALORA", "HIRA", "PSOFT", "SHIRA", "TINYLORA", "UNILORA", "WAVEFT"}
)
# These change no weight of the base, or change with every text.
_NO_WEIGHTS = frozenset(
    {
        "ADAPTION_PROMPT",
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "POLY",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "XLORA",
    }
)
# Values of `init_lora_weights` that take a part of the base's weights out: B A at the start.
_INITS_FROM_BASE = ("corda", "lora_ga", "olora", "pissa")
USED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# The sub-configurations here speak of initialisation, and only for the value of
# `init_lora_weights` that goes with them, which is judged itself.
# PEFT of today does not read these: ms-swift writes `lora_dtype`, `lorap_emb_lr`, `lorap_lr_ratio`,
# axolotl `nvfp4_merge_aware`, and PEFT itself wrote `merge_weights` in 2023.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "merge_weights",
        "nvfp4_merge_aware",
        "peft_version",
        "qalora_group_size",
        "runtime_config",
    }
)

# Key -> the values that leave plain LoRA. Sub-configurations are refused even when empty: PEFT
# turns `{}` into the defaults and switches the variant on.
REFUSED: dict[str, tuple[object, ...]] = {
    "arrow_config": (None,),
    "enable_lora": (None, []),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "swift_type": (None, "LORA"),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "velora_config": (None,),
}

# Values of `init_lora_weights` that leave the base's weights alone: what is saved is the whole
# result. With these B (MiCA: A) starts at zero, so a module without saved tensors changes nothing.
INIT_FROM_ZERO: tuple[object, ...] = (True, "gaussian", "eva", "mica")
# With these it starts at random: a module without saved tensors has no defined result.
INIT_RANDOM: tuple[object, ...] = (False, "orthogonal")
# Any other is refused: for `pissa`, `pissa_niter_N`, `olora`, `corda`, `loftq` and `lora_ga` PEFT
# changes the base's weights at every load. It subtracts the initial product, or quantises them.

UNUSED_VALUES: tuple[object, ...] = (None, False, 0, "", [], {})

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
MAX_ALPHA = 1e6
MAX_TARGETS = 16_384
MAX_PATTERNS = 1024
_MAX_NAME_CHARS = 512
_MAX_PATTERN_CHARS = 4096
_MAX_LAYERS = 4096
_MAX_LAYERS_PATTERNS = 64
_MAX_INVOCATION = 1024
_MAX_TRAINED = 8192
# Modules that an adapter may have whole, or rows of.
TABLES = ("embed_tokens", "lm_head")
# What PEFT calls a classifier, and what it then adds to `modules_to_save`: a model has one of them.
SEQ_CLS, TOKEN_CLS = "SEQ_CLS", "TOKEN_CLS"
_HEADS_OF_OTHERS = ("classifier",)
# PEFT's defaults, for keys that a config leaves out.
_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8.0
# Whose biases an adapter has trained: of no module, of all, or of those that it targets.
Bias = Literal["none", "all", "lora_only"]
_TEXTS = {"true": True, "false": False}
_Number = TypeVar("_Number", int, float)
# How names of norms end, in any model.
_NORM = re.compile(r"(?:.*[._])?(?:\w*norm(?:_?[\df])?|\w*LayerNorm|ln_\w+)")


def way_out(peft_type: object) -> str:
    """Advises what to do with an adapter whose `peft_type` is not LORA."""
    if not isinstance(peft_type, str):
        return "PEFT writes the method's name there"
    if peft_type in CONVERTED:
        return CONVERT
    if peft_type in _SAVED_AS_LORA:
        return "peft.save_as_lora makes LoRA of it"
    if peft_type in _NO_WEIGHTS:
        return "no LoRA is equal to it; train LoRA instead"
    return "merge it into its base with PEFT (merge_and_unload) and serve that model"


def takes_from_base(init: object) -> bool:
    """Whether this `init_lora_weights` leaves the base with other weights than it had."""
    return isinstance(init, str) and init.lower().startswith(_INITS_FROM_BASE)


class PeftConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The used part of a LoRA config; each field means what PEFT's field of that name means.

    Fields with defaults came later: a config without them keeps the digest it always had.

    target_modules, exclude_modules: a pattern for the whole path of a module, or names of its end.
    rank_pattern, alpha_pattern: pairs in the file's order; the first that matches wins.
    starts_at_zero: a targeted module without saved tensors changes nothing.
    target_parameters: names of the end of a parameter's path. peft_version: "" without them, as it
        counts for them alone.
    alora_invocation_tokens: ids from whose last occurrence in the prompt on the adapter acts; () =
        it acts on all tokens.
    bias: whose biases the adapter has in place of the base's. lora_bias: B has a bias of its own.
    modules_to_save: tables (by short names) and norms that it has whole, in place of the base's;
        its score head.
    task_type: `TOKEN_CLS`, whose head gives each token scores; `SEQ_CLS` where the adapter may have
        a score head and `modules_to_save` is empty.
    trainable_token_indices: by table, the tokens whose rows the adapter has, in the file's order.
    ties_saved: whether tied tables of `modules_to_save` stay one: where `ensure_weight_tying` says
        so, and a name is one that PEFT knows.
    use_dora: `(W + scale * B A)` has rows of the lengths that the adapter's magnitudes say.
    """

    base_model_name_or_path: str
    revision: str
    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    layers_to_transform: int | tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    fan_in_fan_out: bool
    starts_at_zero: bool
    ensure_weight_tying: bool
    target_parameters: tuple[str, ...] = ()
    peft_version: str = ""
    alora_invocation_tokens: tuple[int, ...] = ()
    use_dora: bool = False
    bias: Bias = "none"
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    task_type: str = ""
    ties_saved: bool = False

    def scale(self, lora_rank: int, lora_alpha: float) -> float:
        """Returns the factor of `B A x`: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        return lora_alpha / (math.sqrt(lora_rank) if self.use_rslora else lora_rank)


def parse_config(data: bytes, findings: Findings) -> PeftConfig | None:
    """The config that the bytes of `adapter_config.json` spell.

    Everything refused is added to `findings`. None when a used value is missing or wrong, so that
    tensors cannot be judged by it.
    """
    if len(data) > MAX_CONFIG_BYTES:
        message = f"{CONFIG_FILE} has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are read"
        findings.add("file_too_large", CONFIG_FILE, message)
        return None
    try:
        raw = decode_object(data)
    except StrictJsonError as error:
        findings.add("bad_config", CONFIG_FILE, f"{CONFIG_FILE} is {error}")
        return None
    _check_features(raw, findings)
    before = len(findings)
    config = _read(_Reader(raw, findings))
    return config if len(findings) == before else None


def is_norm(name: str) -> bool:
    """Whether a name of `modules_to_save` is, or ends, that of a norm."""
    return _NORM.fullmatch(name) is not None


def names_table(names: Iterable[str]) -> bool:
    """Whether PEFT takes some of these for a table: it knows one name of each."""
    return any(name.rpartition(".")[2] in TABLES for name in names)


def is_of_encoders(name: str) -> bool:
    """Whether a name of `modules_to_save` is of an encoder's score head."""
    return any(part in HEADS_OF_ENCODERS for part in name.split("."))


def may_be_saved(name: str) -> bool:
    """Whether a name of `modules_to_save` is of a kind that adapters may have whole."""
    return name in (*TABLES, HEAD_OF_CLASSES) or is_norm(name) or is_of_encoders(name)


def unserved_module(name: str) -> str:
    """Why an adapter cannot have this module whole."""
    served = " and ".join((*TABLES, HEAD_OF_CLASSES))
    return f"modules_to_save: {shown(name)} is not served, only norms, {served} are, by any name"


def trained_for(data: bytes) -> str:
    """The base's name, whatever else the bytes of a config hold; empty when there is none."""
    try:
        name = decode_object(data).get("base_model_name_or_path")
    except StrictJsonError:
        return ""
    return name if isinstance(name, str) and len(name) <= _MAX_NAME_CHARS else ""


def _check_features(raw: dict[str, Any], findings: Findings) -> None:
    peft_type = raw.get("peft_type")
    if peft_type != "LORA":
        message = f"peft_type is {shown(peft_type)}; only 'LORA' is served: {way_out(peft_type)}"
        findings.add("unsupported_peft_type", "peft_type", message)
    for key, value in raw.items():
        if key in USED or key in HARMLESS:
            continue
        if key in REFUSED:
            if not _is_one_of(value, REFUSED[key]):
                allowed = " or ".join(json.dumps(item) for item in REFUSED[key])
                message = f"{key}={shown(value)} changes the maths; expected {allowed}"
                findings.add("unsupported_feature", key, message)
        elif not _is_one_of(value, UNUSED_VALUES):
            message = f"unknown key {shown(key)} is set to {shown(value)}; it may change the maths"
            findings.add("unknown_key", key, message)
    init = raw.get("init_lora_weights", True)
    if init is not None and not _is_one_of(init, INIT_FROM_ZERO + INIT_RANDOM):
        message = f"init_lora_weights={shown(init)} changes the base model's weights: " + (
            CONVERT if takes_from_base(init) else "merge it into that base and serve the model"
        )
        findings.add("unsupported_feature", "init_lora_weights", message)


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Equality in which `0`, `0.0` and `False` differ only by type, as `1` and `True` do."""
    return any(value == item for item in allowed)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS and value.isascii()


def _read(reader: "_Reader") -> PeftConfig:
    parameters = reader.names("target_parameters")
    saved = reader.saved("modules_to_save")
    task = reader.raw.get("task_type")
    is_kept = task == TOKEN_CLS or (task == SEQ_CLS and not saved)
    config = PeftConfig(
        base_model_name_or_path=reader.text("base_model_name_or_path"),
        revision=reader.text("revision"),
        lora_rank=reader.rank("r", reader.raw.get("r", _DEFAULT_RANK)),
        lora_alpha=reader.alpha("lora_alpha", reader.raw.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=reader.flag("use_rslora"),
        target_modules=reader.modules("target_modules"),
        exclude_modules=reader.modules("exclude_modules"),
        rank_pattern=reader.pairs("rank_pattern", reader.rank),
        alpha_pattern=reader.pairs("alpha_pattern", reader.alpha),
        layers_to_transform=reader.layers("layers_to_transform"),
        layers_pattern=reader.names("layers_pattern", _MAX_LAYERS_PATTERNS),
        fan_in_fan_out=reader.flag("fan_in_fan_out", texts=True),
        starts_at_zero=reader.raw.get("init_lora_weights", True) in INIT_FROM_ZERO,
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        target_parameters=parameters,
        peft_version=reader.text("peft_version") if parameters else "",
        alora_invocation_tokens=reader.tokens("alora_invocation_tokens"),
        use_dora=reader.flag("use_dora"),
        bias=reader.bias("bias"),
        lora_bias=reader.flag("lora_bias"),
        modules_to_save=saved,
        trainable_token_indices=reader.trained_tokens("trainable_token_indices"),
        task_type=str(task) if is_kept else "",
        ties_saved=reader.flag("ensure_weight_tying")
        and names_table(reader.names("modules_to_save")),
    )
    if not config.target_modules and not parameters:
        reader.refuse("target_modules", "missing or empty: the adapter targets nothing")
    for key, given in (
        ("layers_to_transform", config.layers_to_transform is not None),
        ("layers_pattern", bool(config.layers_pattern)),
    ):
        if given and isinstance(config.target_modules, str):
            reader.refuse(key, "cannot be combined with a pattern in target_modules")
    if config.layers_pattern and config.layers_to_transform is None:
        reader.refuse("layers_pattern", "needs layers_to_transform")
    return config


class _Reader:
    """Typed access to the used keys; a wrong value becomes a violation and a harmless stand-in."""

    def __init__(self, raw: dict[str, Any], findings: Findings) -> None:
        self.raw = raw
        self._findings = findings

    def refuse(self, key: str, reason: str) -> None:
        """Notes a bad value. key: of the config, with the pattern within it."""
        self._findings.add("bad_value", key, f"{key}: {reason}")

    def text(self, key: str) -> str:
        value = self.raw.get(key)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > _MAX_NAME_CHARS or not value.isprintable():
            self.refuse(key, f"expected a name, got {shown(value)}")
            return ""
        return value

    def flag(self, key: str, texts: bool = False) -> bool:
        """Reads a key that is true or false. texts: also as some wrote it in 2023, where neither
        value changes the result.
        """
        value = self.raw.get(key)
        if texts and isinstance(value, str):
            value = _TEXTS.get(value.lower(), value)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, f"expected true or false, got {shown(value)}")
        return value is True

    def bias(self, key: str) -> Bias:
        value = self.raw.get(key)
        for known in get_args(Bias):
            if value == known:
                return cast(Bias, known)
        if value is not None:
            expected = ", ".join(map(shown, get_args(Bias)))
            self.refuse(key, f"expected one of {expected}, got {shown(value)}")
        return "none"

    def rank(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            self.refuse(key, f"a rank is an integer from 1 to {MAX_RANK}, got {shown(value)}")
            return 1
        return value

    def alpha(self, key: str, value: object) -> float:
        number = value if type(value) is float or type(value) is int else math.nan
        if not 0 < abs(number) <= MAX_ALPHA:
            self.refuse(key, f"alpha is a number, not 0, within {MAX_ALPHA:g}, got {shown(value)}")
            return 1.0
        return float(number)

    def modules(self, key: str) -> str | tuple[str, ...]:
        value = self.raw.get(key)
        if isinstance(value, str):
            if len(value) > _MAX_PATTERN_CHARS or not value.isascii():
                limit = f"at most {_MAX_PATTERN_CHARS} characters of ASCII"
                self.refuse(key, f"a pattern has {limit}, got {shown(value)}")
                return ()
            return value
        return self.names(key)

    def names(self, key: str, most: int = MAX_TARGETS) -> tuple[str, ...]:
        """A list of names, sorted (PEFT keeps a set); one string is a list of one."""
        value = self.raw.get(key)
        if value is None or value == "":
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > most:
            self.refuse(key, f"expected a list of at most {most} names, got {shown(value)}")
            return ()
        for item in items:
            if not _is_name(item):
                self.refuse(key, f"expected names in ASCII, got {shown(item)}")
                return ()
        return tuple(sorted(set(items)))

    def saved(self, key: str) -> tuple[str, ...]:
        names = tuple(sorted({table_of(name) or name for name in self.names(key)}))
        if HEAD_OF_CLASSES in names:
            names = tuple(name for name in names if name not in _HEADS_OF_OTHERS)
        return names

    def trained_tokens(self, key: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """A list is of the embedding."""
        value = self.raw.get(key)
        if value is None or value == [] or value == {}:
            return ()
        by_table = value if isinstance(value, dict) else {TABLES[0]: value}
        tables = [table_of(name) for name in by_table if isinstance(name, str)]
        if None in tables or len({*tables}) < len(by_table):
            message = f"{key}: tables are {' and '.join(TABLES)}, got {shown(list(by_table))}"
            self._findings.add("unsupported_feature", key, message)
            return ()
        found = []
        for table, ids in zip(filter(None, tables), by_table.values(), strict=True):
            tokens = self.tokens(key, _MAX_TRAINED, ids)
            if len(set(tokens)) < len(tokens):
                self.refuse(key, "a token is there twice")
            found.append((table, tokens))
        return tuple(found)

    def tokens(self, key: str, most: int = _MAX_INVOCATION, ids: object = None) -> tuple[int, ...]:
        """Reads a key that lists token ids. ids: a part of the value; None = the value."""
        value = self.raw.get(key) if ids is None else ids
        if value is None:
            return ()
        if not isinstance(value, list) or not 0 < len(value) <= most:
            self.refuse(key, f"expected 1 to {most} token ids, got {shown(value)}")
            return ()
        for item in value:
            if type(item) is not int or item < 0:
                self.refuse(key, f"expected token ids, got {shown(item)}")
                return ()
        return tuple(value)

    def pairs(
        self, key: str, read: Callable[[str, object], _Number]
    ) -> tuple[tuple[str, _Number], ...]:
        """Reads a key that maps patterns to values. read: makes the values."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self.refuse(
                key, f"expected an object of at most {MAX_PATTERNS} keys, got {shown(value)}"
            )
            return ()
        for pattern in value:
            if not _is_name(pattern):
                self.refuse(key, f"expected patterns in ASCII, got {shown(pattern)}")
                return ()
        return tuple((each, read(f"{key}[{shown(each)}]", of)) for each, of in value.items())

    def layers(self, key: str) -> int | tuple[int, ...] | None:
        """Reads a key that lists layers. None when unset or empty: then all are transformed."""
        value = self.raw.get(key)
        if value is None or value == []:
            return None
        items = value if isinstance(value, list) else [value]
        if len(items) > _MAX_LAYERS or not all(
            type(item) is int and 0 <= item < _MAX_LAYERS for item in items
        ):
            self.refuse(key, f"expected layer indices, got {shown(value)}")
            return None
        return tuple(sorted(set(items))) if isinstance(value, list) else items[0]
