"""Finds the base's module that each tensor of an adapter belongs to, or why there is none. Pure."""

import re
from collections.abc import Iterable

import msgspec

from loraplex.adapters.base import ANY_EXPERT, MODEL_SITES, BaseModule, BaseSpec, base_modules
from loraplex.adapters.errors import Findings, shown
from loraplex.adapters.peft.targeting import aliases, holders
from loraplex.adapters.peft.tensor_names import (
    Naming,
    Spelling,
    TensorName,
    is_of_images,
    meant_by_any,
    parse_tensor_name,
    spelling_of,
)
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo

_BESIDE_OWN = frozenset(("modules_to_save", "original_module"))
_LAYER = re.compile(r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\..+")
_EXPERT = re.compile(r"(?P<head>.+\.)(?P<expert>0|[1-9][0-9]{0,5})(?P<tail>\.[^.]+)")


class SortedTensors(msgspec.Struct):
    """An adapter's tensors, sorted by what they are for. naming: how the adapter calls the modules.
    pairs: path in the base -> side -> tensor. copies: short name -> a copy of the base's own
    weights. has_experts: some pairs are of modules that each expert has. biases: path -> the
    module's own bias. wrapped_biases: paths of those that PEFT has wrapped. tables, rows: short
    name -> what the adapter has of a table, whole or for some tokens. whole: tensors of norms and
    of a score head, by their names in the base. of_images: modules of a part for images, which are
    left out.
    """

    naming: Naming
    pairs: dict[str, dict[str, TensorInfo]] = {}
    copies: tuple[tuple[str, TensorInfo], ...] = ()
    has_experts: bool = False
    biases: dict[str, TensorInfo] = {}
    wrapped_biases: set[str] = set()
    tables: dict[str, TensorInfo] = {}
    rows: dict[str, TensorInfo] = {}
    whole: dict[str, TensorInfo] = {}
    of_images: set[str] = set()


def sort_tensors(
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    findings: Findings,
    own: frozenset[str] = frozenset(),
    *,
    text_part_only: bool = False,
) -> SortedTensors:
    """Finds the module of each tensor; tensors of no module are added to `findings`.

    own: tables, and tensors of norms and of the score head, that the adapter may have whole. Tables
    go by short names, tensors by their names in the base. text_part_only: LoRA of a part for images
    is left out.
    """
    named = [(tensor, parse_tensor_name(tensor.name)) for tensor in tensors]
    spelling = spelling_of(name for _, name in named if name is not None)
    sorter = _Sorter(spelling, base, findings, own)
    # Of a tensor that is there twice, the odd spelling is the duplicate.
    for tensor, name in sorted(named, key=lambda each: not (each[1] and spelling.is_of(each[1]))):
        if text_part_only and name is not None and name.side and is_of_images(name.path):
            sorter.found.of_images.add(name.path)
        else:
            sorter.add(tensor, name)
    return sorter.found


class _Sorter:
    """Sorts tensors into the base's modules. spelling: of most tensors, and so of all."""

    def __init__(
        self, spelling: Spelling, base: BaseSpec, findings: Findings, own: frozenset[str]
    ) -> None:
        self.found = SortedTensors(spelling.naming)
        self._own = own
        self._spelling = spelling
        self._base = base
        self._findings = findings
        modules = {module.path: module for module in base_modules(base)}
        # By path: with the experts' number left open, how many experts there are.
        self._experts = {
            path: module.shape.experts
            for path, module in modules.items()
            if module.shape.is_of_experts
        }
        self._table = {path: modules[path] for path in modules.keys() - self._experts.keys()}
        self._holders = frozenset(holders(base))
        self._aliases = dict(aliases(base))

    def add(self, tensor: TensorInfo, name: TensorName | None) -> None:
        path = None if name is None else meant_by_any(name.path)
        path = self._aliases.get(path or "", path)
        if name is not None and (self._is_beside_own(name) or self._base.is_unread(path or "")):
            return
        if name is None or path is None:
            self._findings.add(*self._unknown(tensor.name, name, path))
        elif _whole_name(path, name) in self._own:
            self._put(self.found.whole, _whole_name(path, name), tensor, name)
        elif name.is_bias and path in self._table:
            self._put(self.found.biases, path, tensor, name)
            if name.is_wrapped and self.found.biases.get(path) is tensor:
                self.found.wrapped_biases.add(path)
        elif (
            path in self._table
            and not name.side
            and not name.is_bias
            and self._table[path].name in MODEL_SITES
        ):
            self._add_copy(tensor, name, self._table[path])
        elif not name.side or not self._is_known(path):
            self._findings.add(*self._unknown(tensor.name, name, path))
        else:
            self._add_side(tensor, name, path)

    def _is_beside_own(self, name: TensorName) -> bool:
        """Whether this is a second copy of what `modules_to_save` names.

        PEFT also writes the base's table, resized tables twice, and with `bias` all biases twice.
        It computes with neither copy.
        """
        head, _, last = name.path.rpartition(".")
        path = meant_by_any(head) if last in _BESIDE_OWN else None
        if path is None:
            return False
        is_table = path in self._table and self._table[path].name in self._own
        return is_table or _whole_name(path, name) in self._own

    def _put(
        self, found: dict[str, TensorInfo], key: str, tensor: TensorInfo, name: TensorName
    ) -> None:
        """Put a tensor in its place, unless another is there, or its name is spelled otherwise."""
        if key in found:
            message = f"{tensor.name}: the same tensor is stored twice, also as {found[key].name}"
            self._findings.add("duplicate_tensor", tensor.name, message)
        elif self._is_spelled_alike(tensor, name):
            found[key] = tensor

    def _is_known(self, path: str) -> bool:
        """Whether there may be LoRA of it."""
        if path in self._table or path in self._holders:
            return True
        open_path, expert = _expert_of(path)
        is_known = expert < self._experts.get(open_path, 0)
        self.found.has_experts |= is_known
        return is_known

    def _add_copy(self, tensor: TensorInfo, name: TensorName, module: BaseModule) -> None:
        if name.is_rows:
            self._put(self.found.rows, module.name, tensor, name)
            return
        if not _has_rows_of_all(module, tensor, self._base, self._findings):
            return
        if module.name in self._own or tensor.shape[0] != self._base.vocab_size:
            self._put(self.found.tables, module.name, tensor, name)
        elif self._is_spelled_alike(tensor, name) and _is_comparable(
            module, tensor, self._base, self._findings
        ):
            self.found.copies += ((module.name, tensor),)

    def _add_side(self, tensor: TensorInfo, name: TensorName, path: str) -> None:
        module = self._table.get(path)
        is_embedding = module is not None and module.name == "embed_tokens"
        is_odd = is_embedding is not name.is_embedding or is_embedding is name.has_weight
        if is_odd and not name.is_of_outputs:
            kind = "lora_embedding_A/B" if is_embedding else "lora_A/B.weight"
            message = f"{tensor.name}: LoRA of {path} is stored as {kind}"
            self._findings.add("misplaced_tensor", tensor.name, message)
            return
        pair = self.found.pairs.get(path, {})
        self._put(pair, name.side, tensor, name)
        if pair:
            self.found.pairs[path] = pair

    def _is_spelled_alike(self, tensor: TensorInfo, name: TensorName) -> bool:
        """Whether a tensor's name is spelled like most. PEFT loads one spelling at a time: another
        may be of another model.
        """
        spelling, code = self._spelling, "unknown_tensor"
        if spelling.is_of(name):
            return True
        if spelling.naming.meant(name.path) is None:
            code = "unknown_module"
            message = f"{tensor.name}: other tensors name modules as {spelling.naming.words} does"
        elif name.has_prefix is not spelling.has_prefix:
            message = f"{tensor.name}: some tensors begin with base_model.model. and some do not"
        else:
            adapters = f"{shown(name.adapter)} and {shown(spelling.adapter)}"
            message = f"{tensor.name}: the file holds two adapters, {adapters}"
        self._findings.add(code, tensor.name, message)
        return False

    def _unknown(
        self, stored_name: str, name: TensorName | None, path: str | None
    ) -> tuple[str, str, str]:
        """Describes a tensor that has no place, as a code, a subject and a message. stored_name:
        the tensor's, in the file. path: what the module would be in the base.
        """
        if name is not None and name.is_bias:
            message = f"{stored_name}: an own bias of {name.path} is not served"
            return "unknown_tensor", stored_name, message
        if name is None or not name.side:
            expected = "expected names such as base_model.model.MODULE.lora_A.weight"
            message = f"{stored_name}: not a tensor of plain LoRA on this base model; {expected}"
            return "unknown_tensor", stored_name, message
        layer = _LAYER.fullmatch(path or "")
        if layer and int(layer["layer"]) >= self._base.text_layers:
            message = f"{stored_name}: the base model has {self._base.text_layers} layers"
            return "layer_out_of_range", stored_name, message
        experts = self._experts.get(_expert_of(path or "")[0])
        if experts is not None:
            message = f"{stored_name}: the base model has {experts} experts"
            return "expert_out_of_range", stored_name, message
        message = f"{stored_name}: the base model has no module {name.path}"
        if is_of_images(name.path) and self._base.is_inferred:
            message = f"{stored_name}: can only be checked against the base model; name it"
            return "needs_base", stored_name, message
        if is_of_images(name.path) and self._base.tower_layer < 0:
            message = (
                f"{stored_name}: {name.path} belongs to the part for images, which is not served"
            )
        return "unknown_module", stored_name, message


def _whole_name(path: str, name: TensorName) -> str:
    """The name in the base of a tensor of its own weights; "" = it is none of these."""
    if name.side or name.is_rows or name.is_wrapped:
        return ""
    return f"{path}.{'bias' if name.is_bias else 'weight'}"


def _expert_of(path: str) -> tuple[str, int]:
    """A path with its expert's number left open, and the number; or what is no module's path."""
    found = _EXPERT.fullmatch(path)
    return (found["head"] + ANY_EXPERT + found["tail"], int(found["expert"])) if found else ("", 0)


def _is_comparable(
    module: BaseModule, tensor: TensorInfo, base: BaseSpec, findings: Findings
) -> bool:
    """Whether a saved table can be compared with the base's, here or where the base is known."""
    known = base.is_inferred or base.embedding_digests.get(module.name)
    if tensor.dtype not in FLOAT_DTYPES or not known:
        message = (
            f"{tensor.name}: replaces weights of the base model; save the adapter with "
            "save_embedding_layers=False"
        )
        findings.add("base_weights_included", tensor.name, message)
        return False
    return True


def _has_rows_of_all(
    module: BaseModule, tensor: TensorInfo, base: BaseSpec, findings: Findings
) -> bool:
    """Whether a table has a row for each token of the base, and not too many new ones."""
    rows, columns = base.vocab_size, base.table_width(module.name)
    known = min(base.num_tokens, rows)
    if tensor.shape[1:] == (columns,) and known <= tensor.shape[0] <= base.most_ids:
        return True
    served = f"; tables of {known} to {base.most_ids} rows are served"
    message = f"{tensor.name}: {list(tensor.shape)} resizes the base's [{rows}, {columns}]{served}"
    findings.add("resized_embeddings", tensor.name, message)
    return False
