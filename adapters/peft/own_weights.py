"""Checks weights that an adapter has instead of the base's: tables, a score head, norms. Pure.

Tables are the embedding and the head. Sources: PEFT 0.21, `modules_to_save` (ends of modules'
names: `norm` means every norm), `trainable_token_indices`, `ensure_weight_tying`, and
`PeftModelForSequenceClassification`, which saves `score`, or `classifier` in other models;
transformers' `…ForSequenceClassification`, which has no other head.
"""

from collections.abc import Iterator, Mapping, Set
from math import prod
from typing import Literal

import msgspec

from loraplex.adapters.base import BaseNorm, BaseSpec, ScoreParts, base_modules
from loraplex.adapters.classes import HEAD_OF_CLASSES, MOST_LABELS, MOST_TOKEN_LABELS
from loraplex.adapters.errors import Findings, shown
from loraplex.adapters.peft.config import (
    TOKEN_CLS,
    PeftConfig,
    is_norm,
    is_of_encoders,
    may_be_saved,
    unserved_module,
)
from loraplex.adapters.peft.lora_tensors import OwnNorm, OwnScores, OwnTable
from loraplex.adapters.peft.tensor_names import Naming, spellings_of
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo

EMBEDDING, HEAD = "embed_tokens", "lm_head"


def check_dtype(tensor: TensorInfo, findings: Findings) -> None:
    """Adds a finding unless the tensor holds floats."""
    if tensor.dtype not in FLOAT_DTYPES:
        expected = f"expected one of {sorted(FLOAT_DTYPES)}"
        message = f"{tensor.name}: dtype {tensor.dtype}, {expected}"
        findings.add("unsupported_dtype", tensor.name, message)


def check_floats(tensor: TensorInfo, shape: tuple[int, ...], findings: Findings) -> None:
    """Adds findings unless the tensor holds floats in this shape."""
    check_dtype(tensor, findings)
    if tensor.shape != shape:
        message = f"{tensor.name}: expected {list(shape)}, got {list(tensor.shape)}"
        findings.add("shape_mismatch", tensor.name, message)


def whole_tables(config: PeftConfig, base: BaseSpec) -> frozenset[str]:
    """Lists short names of the tables that the adapter has whole."""
    saved = frozenset({*config.modules_to_save} & {EMBEDDING, HEAD})
    return frozenset((EMBEDDING, HEAD)) if saved and base.is_tied and config.ties_saved else saved


def are_tied(config: PeftConfig, base: BaseSpec) -> bool:
    """Whether both tables are trained as one."""
    return base.is_tied and config.ensure_weight_tying


def check_tables(
    config: PeftConfig, targeted: Set[str], base: BaseSpec, findings: Findings
) -> None:
    """Checks what the config says of tables. targeted: whole names of modules."""
    whole, rows = whole_tables(config, base), dict(config.trainable_token_indices)

    def refuse(key: str, words: str) -> None:
        findings.add("unsupported_feature", key, f"{key}: {words}")

    has_tied_head = base.is_tied and not base.score_heads
    trained = {*rows, HEAD} if has_tied_head and EMBEDDING in rows else rows.keys()
    for key, names in (("modules_to_save", whole), ("trainable_token_indices", trained)):
        if names and config.alora_invocation_tokens:
            refuse(key, "not with alora_invocation_tokens, since it acts on all tokens")
        for module in (base.model_modules[name] for name in names & base.model_modules.keys()):
            if module.path in targeted:
                refuse(key, f"{module.path} is targeted, too; an adapter has one of the two")
            if module.has_bias and names is not whole:
                refuse(key, f"{module.path} of the base model has a bias, which PEFT leaves out")
    if whole and rows and (base.is_tied or whole & rows.keys()):
        refuse("trainable_token_indices", "not beside modules_to_save of the same or a tied table")
    if len(set(rows.values())) > 1 and are_tied(config, base):
        refuse("ensure_weight_tying", "the tied tables have different trainable_token_indices")
    wrong = [each for ids in rows.values() for each in ids if each >= base.most_ids]
    if wrong and not base.is_inferred:
        served = f"ids 0 to {base.most_ids - 1} are served"
        message = f"trainable_token_indices: {wrong[0]} is no token; {served}"
        findings.add("bad_value", "trainable_token_indices", message)


class TablePlacer:
    """Places the tables that an adapter has of its own. tables, rows: short name -> what the
    adapter has. What is wrong is added to `findings`.
    """

    def __init__(
        self,
        config: PeftConfig,
        tables: Mapping[str, TensorInfo],
        rows: Mapping[str, TensorInfo],
        base: BaseSpec,
        findings: Findings,
    ) -> None:
        self._config, self._base, self._findings = config, base, findings
        self._tables, self._rows = tables, rows

    def place(self) -> tuple[OwnTable, ...]:
        whole, trained = tuple(self._whole()), tuple(self._trained())
        rows = {table.module: table for table in trained}
        joined = tuple(self._joined(table, rows.pop(table.module, None)) for table in whole)
        tables = (*joined, *(table for table in trained if table.module in rows))
        is_resized = any(table.size > self._base.vocab_size for table in whole)
        if not (is_resized or self._base.is_inferred):
            self._check_new(tables)
        return tables

    def _joined(self, whole: OwnTable, rows: OwnTable | None) -> OwnTable:
        """Joins a resized table with its trained rows, which PEFT saves apart."""
        if rows is None:
            return whole
        size = whole.size
        if any(each >= size for each in rows.ids):
            message = f"trainable_token_indices: {max(rows.ids)}, and the tables have {size} rows"
            self._findings.add("bad_value", "trainable_token_indices", message)
        return msgspec.structs.replace(whole, trained=rows.tensor, trained_ids=rows.ids)

    def _check_new(self, tables: tuple[OwnTable, ...]) -> None:
        """Adds a finding for each table without rows of new ids: PEFT would take random ones. Adds
        another where ids are new and the head has a bias.
        """
        base, of_module = self._base, {table.module: table for table in tables}
        size = max((table.size for table in tables), default=0)
        new = range(base.vocab_size, min(size, base.most_ids))  # others are refused already
        for name in (EMBEDDING, HEAD) if new else ():
            table = of_module.get(name)
            there = () if table is None else table.ids or range(table.size)
            lacking = sorted(set(new).difference(there))
            if lacking:
                ids = shown(lacking[:8])
                message = (
                    f"{name} has no rows of the new ids {ids}; save_embedding_layers saves them"
                )
                self._findings.add("resized_embeddings", name, message)
        if new and any(module.has_bias for module in base.model_modules.values()):
            message = "new ids on a base whose head has a bias are not supported"
            self._findings.add("unsupported_feature", HEAD, message)

    def _whole(self) -> Iterator[OwnTable]:
        config, base = self._config, self._base
        saved = wanted = whole_tables(config, base)
        if any(table.shape[0] != base.vocab_size for table in self._tables.values()):
            wanted = frozenset((EMBEDDING, HEAD))
            self._check_resized()
        if wanted and base.is_tied and (config.ties_saved or not saved):
            # PEFT loads both into one tensor, the head last.
            shared = self._tables.get(HEAD) or self._tables.get(EMBEDDING)
            found = {} if shared is None else dict.fromkeys(wanted, shared)
        else:
            found = {name: self._tables[name] for name in wanted if name in self._tables}
        for name in sorted(wanted - found.keys()):
            words = "modules_to_save has" if name in saved else "the tables are resized, also"
            message = f"{words} {name}, and the file has no weights of it"
            self._findings.add("missing_tensor", name, message)
        if len({tensor.shape for tensor in found.values()}) > 1:
            message = "embed_tokens and lm_head have different numbers of tokens"
            self._findings.add("resized_embeddings", HEAD, message)
        for name in sorted(found):
            yield OwnTable(name, found[name], ())

    def _check_resized(self) -> None:
        """Checks tables of another size than the base's. PEFT saves them as the training has
        resized them, whatever the config says."""
        modules, vocab = self._base.model_modules.values(), self._base.vocab_size
        is_larger = any(table.shape[0] > vocab for table in self._tables.values())
        for key, is_there in (
            ("alora_invocation_tokens", self._config.alora_invocation_tokens),
            ("a head with a bias", is_larger and any(module.has_bias for module in modules)),
        ):
            if is_there:
                words = "beside resized tables is not supported; train without resizing"
                self._findings.add("unsupported_feature", key, f"{key} {words}")
        for table in self._tables.values():
            check_dtype(table, self._findings)

    def _trained(self) -> Iterator[OwnTable]:
        ids_of = dict(self._config.trainable_token_indices)
        follows = self._base.is_tied and (len(set(ids_of.values())) == 1) and EMBEDDING in ids_of
        stored = {EMBEDDING} if follows else ids_of.keys()
        # Beside resized tables PEFT saves those that both have with each.
        known = {EMBEDDING, HEAD} if follows and self._tables else stored
        for name in sorted(self._rows.keys() - known):
            tensor = self._rows[name]
            message = f"{tensor.name}: trainable_token_indices has no rows of {name} of its own"
            self._findings.add("unknown_tensor", tensor.name, message)
        for name in sorted(stored):
            if name not in self._rows:
                message = f"trainable_token_indices has {name}, and the file has no rows of it"
                self._findings.add("missing_tensor", name, message)
                continue
            tensor, ids = self._rows[name], ids_of[name]
            check_floats(tensor, (len(ids), self._base.table_width(name)), self._findings)
            for each in (EMBEDDING, HEAD) if follows else (name,):
                yield OwnTable(each, tensor, ids)


def own_head(config: PeftConfig, base: BaseSpec) -> Literal["none", "perhaps", "surely"]:
    """Whether the file has a score head."""
    saved = config.modules_to_save
    if HEAD_OF_CLASSES in saved or (base.score_heads and any(map(is_of_encoders, saved))):
        return "surely"
    return "perhaps" if config.task_type else "none"


def score_parts(config: PeftConfig, base: BaseSpec) -> ScoreParts:
    """The tensors of the score head that the adapter may have."""
    return base.score_head(of_tokens=config.task_type == TOKEN_CLS)


def check_head(config: PeftConfig, base: BaseSpec, findings: Findings) -> None:
    """Checks what the config says of a score head."""
    if own_head(config, base) != "surely":
        return
    if config.alora_invocation_tokens:
        message = f"modules_to_save: {HEAD_OF_CLASSES} not with alora_invocation_tokens"
        findings.add("unsupported_feature", "modules_to_save", message)
    trained = (*config.modules_to_save, *(name for name, _ in config.trainable_token_indices))
    if HEAD in trained:
        message = f"{HEAD_OF_CLASSES} and {HEAD}: one adapter has one head"
        findings.add("unsupported_feature", "modules_to_save", message)


def place_head(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], base: BaseSpec, findings: Findings
) -> OwnScores | None:
    """Checks the score head, if any. tensors: by the base's names; others are passed over."""
    parts = score_parts(config, base)
    tensors = {name: tensors[name] for name, _ in parts.tensors if name in tensors}
    if not tensors:
        if own_head(config, base) == "surely":
            head = parts.labels.removesuffix(".weight")
            message = f"modules_to_save has {head}, and the file has no weights of it"
            findings.add("missing_tensor", head, message)
        return None
    missing = sorted(parts.required - tensors.keys())
    if missing:
        message = f"the file has a part of a score head, and no weights {missing[0]}"
        findings.add("missing_tensor", missing[0], message)
        return None
    most = MOST_TOKEN_LABELS if parts.of_tokens else MOST_LABELS
    labels = _check_labels(tensors[parts.labels], base, most, findings)
    placed = []
    for number, (name, shape) in enumerate(parts.tensors):
        if name in tensors and labels:
            placed.append((number, tensors[name]))
            check_floats(tensors[name], tuple(size or labels for size in shape), findings)
    return OwnScores(tuple(placed), parts.of_tokens) if placed else None


def _check_labels(tensor: TensorInfo, base: BaseSpec, most: int, findings: Findings) -> int:
    """Checks the weight of a head's labels, of which there may be `most`. Returns their number."""
    name = tensor.name
    labels = tensor.shape[0] if len(tensor.shape) == 2 else 0
    if not 0 < labels <= most or tensor.shape[1] != base.hidden_size:
        expected = f"1 to {most} labels of {base.hidden_size} numbers each"
        message = f"{name}: expected {expected}, got {list(tensor.shape)}"
        findings.add("shape_mismatch", name, message)
    elif base.num_classes not in (0, labels):
        message = f"{name}: {labels} labels; the base model has {base.num_classes}"
        findings.add("shape_mismatch", name, message)
    return labels


def saved_norms(config: PeftConfig, base: BaseSpec) -> tuple[BaseNorm, ...]:
    """Lists the base's norms that the config names, as any model calls them."""
    names = tuple(filter(is_norm, config.modules_to_save))
    return tuple(norm for norm in base.norms if names and _is_called(norm, names))


def _is_called(norm: BaseNorm, names: str | tuple[str, ...]) -> bool:
    """Whether some model calls the norm so. names: ends of its whole name."""
    return any(name.endswith(names) for name in spellings_of(norm.path))


def tensors_of_norms(config: PeftConfig, base: BaseSpec) -> Iterator[str]:
    """Yields names in the base of the tensors of norms that the adapter may have."""
    saved = saved_norms(config, base)
    for norm in base.norms if config.bias == "all" else saved:
        yield from norm.places(whole=norm in saved)


def check_norms(config: PeftConfig, base: BaseSpec, findings: Findings) -> None:
    """Adds a finding for each norm in `modules_to_save` that is not served, or that the file lacks.
    PEFT passes over a name that no module has.

    Norms beside `alora_invocation_tokens` are a finding, too.
    """
    names = [name for name in config.modules_to_save if is_norm(name)]
    if names and config.alora_invocation_tokens:
        message = "modules_to_save: norms not with alora_invocation_tokens, since they act on all"
        findings.add("unsupported_feature", "modules_to_save", message)
    for name in names if base.is_inferred else ():
        if not any(_is_called(norm, name) for norm in base.norms):
            message = f"modules_to_save: the file has no norm {shown(name)}"
            findings.add("missing_tensor", "modules_to_save", message)
    unserved = {norm.name for norm in saved_norms(config, base) if not norm.is_served}
    for name in sorted(unserved):
        message = (
            f"modules_to_save: {name} is not served, only norms before and behind attention and "
            "MLP, of q and k, on residual sums, of the embedding and at the end are; merge the "
            "adapter into its base, or train it without"
        )
        findings.add("unsupported_feature", "modules_to_save", message)


def check_others(config: PeftConfig, base: BaseSpec, findings: Findings) -> None:
    """Finds modules in `modules_to_save`, or ones that hold others, that no adapter has whole."""
    names = [name for name in config.modules_to_save if not may_be_saved(name)]
    paths = [f"{module.path}." for module in base_modules(base)] if names else []
    for name in names:
        if any(f"{name}." in path for path in paths):
            findings.add("unsupported_feature", "modules_to_save", unserved_module(name))


def place_norms(
    config: PeftConfig,
    tensors: Mapping[str, TensorInfo],
    base: BaseSpec,
    naming: Naming,
    findings: Findings,
) -> Iterator[OwnNorm]:
    """Yields what the adapter has of norms, checked. tensors: by their names in the base, of which
    others are passed over. naming: how the adapter calls them.
    """
    names = tuple(filter(is_norm, config.modules_to_save))
    for norm in base.norms:
        is_saved = bool(names) and (naming.spelled(norm.path) or norm.path).endswith(names)
        for name, place in norm.places(whole=True).items():
            tensor, is_bias = tensors.get(name), place == norm.bias
            if is_saved and tensor is None:
                message = f"modules_to_save has {norm.path}, and the file has no weights of it"
                findings.add("missing_tensor", norm.path, message)
            elif tensor is not None and (is_saved or (is_bias and config.bias == "all")):
                if tensor.shape[1:] == (norm.head,):  # a weight for each head
                    tensor = msgspec.structs.replace(tensor, shape=(prod(tensor.shape),))
                check_floats(tensor, (norm.size,), findings)
                yield OwnNorm(norm, place, tensor)
            elif tensor is not None:
                message = f"{tensor.name}: the config does not name {norm.path} (modules_to_save)"
                findings.add("unknown_tensor", tensor.name, message)
