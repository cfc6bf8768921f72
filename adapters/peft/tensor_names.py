"""Names of an adapter's tensors, as different trainers save them, and their meaning. Pure.

PEFT names them `base_model.model.<module>.lora_A.weight`. Training wrappers add components of their
own, and some savers drop the prefix or keep the adapter's name. `<module>` is as the trained model
calls it: the whole model, the inner one, or the text model within a larger one.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Literal

import msgspec

from loraplex.adapters.classes import HEAD_OF_CLASSES, HEADS_OF_ENCODERS

# torch.compile, FSDP, activation checkpointing, Lightning, DDP and DeepSpeed.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|module)\."
)
_PREFIX = r"(?P<prefix>base_model\.model\.)?"
# PEFT keeps the LoRA of an embedding in parameters, hence no `.weight`.
_LORA = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?P<adapter>\.(?!weight$)[^.]+)?(?P<weight>\.weight)?"
)
# PEFT saves it without the adapter's name and without `.weight`.
_MAGNITUDE = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.lora_magnitude_vector"
    r"(?P<adapter>\.(?!weight$)[^.]+)?(?:\.weight)?"
)
_ROWS = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.token_adapter\.trainable_tokens_delta(?P<adapter>\.[^.]+)?"
)
_B_BIAS = re.compile(rf"{_PREFIX}(?P<path>.+)\.lora_B(?P<adapter>\.[^.]+)?\.bias")
# PEFT wraps what is targeted, and calls the module itself `base_layer`.
_OWN_BIAS = re.compile(rf"{_PREFIX}(?P<path>.+?)(?P<wrapped>\.base_layer)?\.bias")
# Of a table whose rows are trained: in the adapter of its tokens.
_BASE_COPY = re.compile(rf"{_PREFIX}(?P<path>.+?)(?:(?:\.token_adapter)?\.base_layer)?\.weight")
# What PEFT calls an adapter that nobody named, and leaves out when it saves.
_DEFAULT_ADAPTER = "default"
# What the body of a decoder holds, in every model.
_LAYERS = "layers."
_BODY, _POOLER = "model.", "pooler"
_PROJECTIONS = ("project_in", "project_out", "embeddings_project")
_NORMS = ("norm", "embedding_norm", "final_layernorm")
_OF_BODY = ("embed_tokens", *_NORMS, "per_layer_model_projection", *_PROJECTIONS)
_HEADS = ("lm_head", HEAD_OF_CLASSES, *(head for head in HEADS_OF_ENCODERS if head != _POOLER))
_EMBEDDING, _OUTPUT = "embed_tokens", "lm_head"
_WITHIN = "the text model within a larger model"
# Begins of names in MLPs of GPT-2 and its kin.
_OF_MLPS = ("mlp.w", "mlp.c", "mlp.fc_")
_NORMS_OF_LAYERS = ("input_layernorm", "post_attention_layernorm")
# What models call norms outside of layers, and the base's names of these.
_LN_F, _NORM_F, _FINAL = (((name, "norm"),) for name in ("ln_f", "norm_f", "final_layer_norm"))
_OF_EMBEDDING = "word_embeddings_layernorm"
# Parts beside that text model.
_TOWERS = (
    "vision_tower|vision_model|visual|multi_modal_projector|mm_projector|connector|image_tower|"
    "embed_vision"
)
_TOWER = re.compile(rf"(?:{_TOWERS})\.")
_OF_IMAGES = re.compile(
    rf"(?:model\.)?(?:(?:{_TOWERS}|vision_embedder|vision_embed_tokens|audio_tower|embed_audio|"
    r"embed_tokens_extend)\..+|image_newline)|.+\.lora_[AB]\.(?:vision|speech)\..+"
)


# Of a module's LoRA; M = the magnitudes of DoRA, b = a bias of B.
Side = Literal["A", "B", "M", "b"]


class TensorName(msgspec.Struct, frozen=True):
    """A tensor's name in an adapter's file, taken apart. path: of the module, as the trained model
    calls it. side: "" = the module's own weight, or its own bias (is_bias). is_wrapped: of a
    module that PEFT has wrapped. is_rows: of a table, the rows of some tokens.

    is_embedding, has_weight, has_prefix: as spelled. adapter: its name in the training.
    """

    path: str
    side: Side | Literal[""]
    has_prefix: bool
    is_embedding: bool = False
    has_weight: bool = True
    adapter: str = _DEFAULT_ADAPTER
    is_bias: bool = False
    is_wrapped: bool = False
    is_rows: bool = False

    @property
    def is_of_outputs(self) -> bool:
        """Whether the tensor has a number for each output of the module."""
        return self.is_bias or self.side in ("M", "b")


class Naming(msgspec.Struct, frozen=True):
    """A model's names for the modules of its decoder.

    words: describes the model for people. body: the text before `layers.…`.
    head: the text before `lm_head` or `score`; None = the model has neither. layers: the text
    before a layer's number. modules: begins of a module's path in a layer; () = any.
    embedding: the name of the embedding; "" = it cannot be adapted. output: the name of `lm_head`.
    norms: names of norms in the body, with the base's; of models whose layers hold named modules.
    pooler_in_head: modules outside of layers lie where `lm_head` does, else in the body. tower: the
    text before the parts for images; None = there are none.
    """

    words: str
    body: str
    head: str | None
    layers: str = _LAYERS
    modules: tuple[str, ...] = ()
    embedding: str = _EMBEDDING
    output: str = _OUTPUT
    norms: tuple[tuple[str, str], ...] = ()
    pooler_in_head: bool = False
    tower: str | None = None

    @property
    def _beside(self) -> str:
        """The text before modules that lie outside of layers, in models with a pooler."""
        return self.head or "" if self.pooler_in_head else self.body

    def spelled(self, path: str) -> str | None:
        """Spells a module of the base as the trained model does; None = it has no such module."""
        if _TOWER.match(path):
            return None if self.tower is None else self.tower + path
        if path.startswith(_BODY):
            rest = path.removeprefix(_BODY)
            if rest == _EMBEDDING:
                return self.body + self.embedding if self.embedding else None
            own = next((own for own, name in self.norms if name == rest), None)
            if own is not None:
                return self.body + own
            if not rest.startswith(_LAYERS):
                return None if self.modules and not _is_beside(rest) else self._beside + rest
            within = rest.removeprefix(_LAYERS)
            return self.body + self.layers + within if self._has(within) else None
        name = self.output if path == _OUTPUT else path
        return None if self.head is None else self.head + name

    def meant(self, path: str) -> str | None:
        """The module of the base that the trained model calls so, if it can be one."""
        if self.tower is not None and path.startswith(self.tower):
            rest = path.removeprefix(self.tower)
            if _TOWER.match(rest):
                return rest
        rest = path.removeprefix(self.body)
        if path.startswith(self.body) and rest.startswith(self.layers):
            within = rest.removeprefix(self.layers)
            return _BODY + _LAYERS + within if self._has(within) else None
        is_of_body = path.startswith(self.body) and rest.partition(".")[0] in _OF_BODY
        if is_of_body and not self.modules:
            return _BODY + rest
        norm = dict(self.norms).get(rest) if path.startswith(self.body) else None
        if norm is not None:
            return _BODY + norm
        if self.embedding and path == self.body + self.embedding:
            return _BODY + _EMBEDDING
        if path.startswith(self._beside) and _is_beside(path.removeprefix(self._beside)):
            return _BODY + path.removeprefix(self._beside)
        if self.head is None or not path.startswith(self.head):
            return None
        name = path.removeprefix(self.head)
        if name in (self.output, _OUTPUT):
            return _OUTPUT if name == self.output else None
        return name if name.partition(".")[0] in _HEADS else None

    def _has(self, within: str) -> bool:
        """Whether a layer of the model can have this module. within: from the layer's number on."""
        return not self.modules or within.partition(".")[2].startswith(self.modules)


def _is_beside(rest: str) -> bool:
    """Whether a module lies outside the layers. rest: its name in the body."""
    return rest.partition(".")[0] in (_POOLER, *_PROJECTIONS)


WHOLE = Naming("the model itself", _BODY, "", tower="")
NAMINGS = (
    WHOLE,
    Naming("the inner model", "", None),
    Naming(_WITHIN, "model.language_model.", "", tower=_BODY),
    Naming(_WITHIN, "language_model.model.", "language_model.", tower=""),
    Naming(_WITHIN, "language_model.", None, tower=""),
    Naming(_WITHIN, "model.text_model.", "", tower=_BODY),
    Naming(_WITHIN, "text_model.", None, tower=""),
    Naming(
        "a model with GPT-2's names",
        "transformer.",
        "",
        "h.",
        ("attn.", *_OF_MLPS, "ln_"),
        "wte",
        norms=_LN_F,
    ),
    Naming(
        "a model with Falcon's names",
        "transformer.",
        "",
        "h.",
        ("self_attention.", "mlp.dense", *_NORMS_OF_LAYERS, "ln_"),
        "word_embeddings",
        norms=(*_LN_F, (_OF_EMBEDDING, _OF_EMBEDDING)),
    ),
    Naming(
        "a model with MPT's or DBRX's names",
        "transformer.",
        "",
        "blocks.",
        ("attn.", "ffn.", "norm_"),
        "wte",
        norms=_NORM_F,
    ),
    *(
        Naming(
            "a model with Nemotron-H's names",
            body,
            "",
            modules=("mixer.", "norm"),
            embedding="embeddings",
            norms=_NORM_F,
        )
        for body in ("backbone.", _BODY)
    ),
    Naming(
        "a model with OPT's names",
        "model.decoder.",
        "",
        modules=("self_attn", "fc", "final_layer_norm"),
        norms=_FINAL,
    ),
    *(
        Naming(
            "a model with GPT-NeoX's names",
            "gpt_neox.",
            "",
            modules=("attention.", "mlp.dense", *_NORMS_OF_LAYERS),
            embedding="embed_in",
            output=output,
            norms=_FINAL,
        )
        for output in (_OUTPUT, "embed_out")
    ),
    *(
        Naming(
            "a model with BERT's names",
            body,
            "" if body else None,
            "encoder.layer.",
            ("attention.", "intermediate.", "output."),
            "embeddings.word_embeddings",
            norms=(("embeddings.LayerNorm", "embed_norm"),),
            pooler_in_head=body == "deberta.",
        )
        for body in ("bert.", "roberta.", "electra.", "mpnet.", "deberta.", "")
    ),
    *(
        Naming(
            "a model with DistilBERT's names",
            body,
            "" if body else None,
            "transformer.layer.",
            ("attention.", "ffn.", "sa_layer_norm", "output_layer_norm"),
            "embeddings.word_embeddings",
            norms=(("embeddings.LayerNorm", "embed_norm"),),
        )
        for body in ("distilbert.", "")
    ),
    *(
        Naming(
            "a model with ModernBERT's names",
            body,
            "" if body else None,
            modules=("attn.W", "mlp.W", "attn_norm", "mlp_norm"),
            embedding="embeddings.tok_embeddings",
            norms=(("embeddings.norm", "embed_norm"), ("final_norm", "norm")),
        )
        for body in (_BODY, "")
    ),
    Naming(
        "a model with ChatGLM's names",
        "transformer.encoder.",
        None,
        modules=("self_attention.", "mlp.dense"),
        embedding="",
    ),
)


class Spelling(msgspec.Struct, frozen=True):
    """The spelling that all tensors of an adapter have in common."""

    naming: Naming
    has_prefix: bool
    adapter: str

    def is_of(self, name: TensorName) -> bool:
        return (
            self.naming.meant(name.path) is not None
            and name.has_prefix is self.has_prefix
            and (not name.side or name.adapter == self.adapter)
        )


def parse_tensor_name(name: str) -> TensorName | None:
    """Reads a name in any spelling; None = it is neither LoRA nor a weight."""
    plain = _WRAPPERS.sub("", name)
    lora = _LORA.fullmatch(plain)
    # `lora_B.bias` is no adapter's name.
    if lora is not None and (lora["embedding"] or lora["weight"] or not lora["adapter"]):
        return TensorName(
            path=lora["path"],
            side="A" if lora["side"] == "A" else "B",
            has_prefix=bool(lora["prefix"]),
            is_embedding=bool(lora["embedding"]),
            has_weight=bool(lora["weight"]),
            adapter=(lora["adapter"] or _DEFAULT_ADAPTER).removeprefix("."),
        )
    rows = _ROWS.fullmatch(plain)
    if rows is not None:
        return TensorName(rows["path"], "", bool(rows["prefix"]), is_rows=True)
    of_outputs = _of_outputs(plain)
    if of_outputs is not None:
        return of_outputs
    copy = _BASE_COPY.fullmatch(plain)
    return None if copy is None else TensorName(copy["path"], "", bool(copy["prefix"]))


def _of_outputs(plain: str) -> TensorName | None:
    sides: tuple[tuple[re.Pattern[str], Side], ...] = ((_MAGNITUDE, "M"), (_B_BIAS, "b"))
    for pattern, side in sides:
        found = pattern.fullmatch(plain)
        if found is not None:
            return TensorName(
                path=found["path"],
                side=side,
                has_prefix=bool(found["prefix"]),
                adapter=(found["adapter"] or _DEFAULT_ADAPTER).removeprefix("."),
            )
    own = _OWN_BIAS.fullmatch(plain)
    if own is None:
        return None
    wrapped = bool(own["wrapped"])
    return TensorName(own["path"], "", bool(own["prefix"]), is_bias=True, is_wrapped=wrapped)


def spelling_of(names: Iterable[TensorName]) -> Spelling:
    """The spelling of most LoRA tensors; of two, or without any, that of most other tensors."""
    namings: Counter[Naming] = Counter()
    others: Counter[Naming] = Counter()
    prefixes: Counter[bool] = Counter()
    adapters: Counter[str] = Counter()
    listed = list(names)
    for name in [name for name in listed if name.side] or listed:
        namings.update(naming for naming in NAMINGS if naming.meant(name.path) is not None)
        prefixes[name.has_prefix] += 1
        adapters[name.adapter] += 1
    for name in (name for name in listed if not name.side):
        others.update(naming for naming in NAMINGS if naming.meant(name.path) is not None)
    return Spelling(
        naming=max(NAMINGS, key=lambda naming: (namings[naming], others[naming])),
        has_prefix=prefixes[True] >= prefixes[False],
        adapter=max(adapters, key=lambda adapter: adapters[adapter], default=_DEFAULT_ADAPTER),
    )


def is_of_images(path: str) -> bool:
    """Whether a larger model calls a module, or a tensor, of its part for images so."""
    return _OF_IMAGES.fullmatch(path) is not None


def spellings_of(path: str) -> tuple[str, ...]:
    """The names of a module of the base in any model, and in the base."""
    return path, *filter(None, (naming.spelled(path) for naming in NAMINGS))


def meant_by_any(path: str) -> str | None:
    """The module of the base that some model calls so."""
    found = (naming.meant(path) for naming in NAMINGS)
    return next((path for path in found if path is not None), None)


@cache
def _spelled_tables() -> tuple[tuple[str, str], ...]:
    """Every model's whole names of its tables, after a dot, and their short names."""
    tables = ((_BODY + _EMBEDDING, _EMBEDDING), (_OUTPUT, _OUTPUT))
    found = ((f".{naming.spelled(path)}", table) for naming in NAMINGS for path, table in tables)
    return tuple(dict.fromkeys(found))


def table_of(name: str) -> str | None:
    """The short name of the table that some model calls so. name: whole, or its end."""
    end = f".{name}"
    return next((table for own, table in _spelled_tables() if own.endswith(end)), None)
