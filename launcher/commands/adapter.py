"""`loraplex adapter check|pull|pack|convert`: what the worker does with an adapter, by hand."""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import get_token

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.chat.conversation import MessageForm, TemplateFault
from loraplex.adapters.errors import AdapterError, Findings, Violation
from loraplex.adapters.judge import Judged, judge_folder
from loraplex.adapters.manifest import AdapterManifest, AdapterTemplate
from loraplex.adapters.peft.files import USUAL_TOKENS, small_files, weight_files
from loraplex.adapters.peft.tensor_names import WHOLE
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import (
    AdapterRef,
    RefSource,
    local_name,
    parse_ref,
    path_of_local,
    shown_place,
)
from loraplex.adapters.slab.file import write_slab_file
from loraplex.adapters.slab.memory import one_after_another
from loraplex.adapters.sources.base import Source
from loraplex.adapters.sources.enabled import open_sources
from loraplex.adapters.store.store import AdapterStore
from loraplex.launcher.convert.command import check_new_folder, convert
from loraplex.launcher.convert.plan import Conversion
from loraplex.launcher.demo import BASE_NAME, model_path
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import as_json
from loraplex.launcher.serving.plan import is_demo_model
from loraplex.router.api.admin.adapters import EndToken, end_tokens, partial_of
from loraplex.router.call import RequestError
from loraplex.router.generation.ends import AnswerEnds
from loraplex.router.text.model import AdapterModels, TextModel
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.server.model.card import model_card, read_base_spec
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, read_config
from loraplex.server.worker.process.model_source import ModelError, ModelFolder, find_model
from loraplex.server.worker.process.sizing import choose_extent_bytes


class Report(msgspec.Struct, frozen=True):
    """One adapter. manifest: None = it cannot be served, for every one of `violations`.

    copies: modules of the base whose weights came along, without a base to compare them with.
    templates: how its chat templates read messages, or why they cannot be used.
    trained_on: the model whose names the tensors have; "" = not known.
    conversion: how it was made, if it was made just now.
    ends: tokens that end its answers, beside the base's; None = not looked for.
    """

    ref: str
    manifest: AdapterManifest | None
    copies: Sequence[str] = ()
    violations: Sequence[Violation] = ()
    templates: Mapping[str, MessageForm | str] = {}
    trained_on: str = ""
    conversion: Conversion | None = None
    ends: Sequence[EndToken] | None = None

    def written(self, *, for_programs: bool) -> str:
        if for_programs:
            return as_json([self._table()])
        return self._refusal() if self.manifest is None else self._text(self.manifest)

    def _table(self) -> dict[str, Any]:
        can_be_served = self.manifest is not None
        table: dict[str, Any] = {"ref": self.ref, "can_be_served": can_be_served}
        table["violations"] = msgspec.to_builtins(self.violations)
        if self.manifest is not None:
            names = ("digest", "base", "ranks", "targets", "nbytes", "dtype")
            table |= {name: getattr(self.manifest, name) for name in names}
            partial = msgspec.to_builtins(partial_of(self.manifest))
            table |= {"partial": partial, "not_compared": _sorted(self.copies)}
            table["chat_templates"] = msgspec.to_builtins(self.templates)
            table |= {"trained_on": self.trained_on} if self.trained_on else {}
            table["added_tokens"] = msgspec.to_builtins(self.manifest.added_tokens)
            table["ends"] = msgspec.to_builtins(self.ends)
        if self.conversion is not None:
            table["conversion"] = msgspec.to_builtins(self.conversion)
        return table

    def _refusal(self) -> str:
        count = len(self.violations)
        is_unknown = all(v.code == "needs_base" for v in self.violations)
        fate = "be checked without --base MODEL" if is_unknown else "be served"
        lines = [f"{self.ref} cannot {fate}: {count} reason{'s' if count > 1 else ''}"]
        for v in self.violations:
            lines.append(f"  {v.code} at {v.where}: {v.message.removeprefix(f'{v.where}: ')}")
        return "".join(f"{line}\n" for line in lines)

    def _text(self, manifest: AdapterManifest) -> str:
        lines = [
            *(self.conversion.lines() if self.conversion is not None else ()),
            f"{self.ref} can be served",
            f"  digest   {manifest.digest}",
            f"  base     {manifest.base or '(names none)'}",
            f"  ranks    {', '.join(map(str, manifest.ranks))}",
            f"  targets  {', '.join(manifest.targets)}",
            f"  bytes    {manifest.nbytes:,} ({manifest.dtype})",
        ]
        if self.trained_on not in ("", WHOLE.words):
            lines.append(f"  names    of tensors are those of {self.trained_on}")
        if manifest.added_tokens:
            lines.append(f"  tokens   {len(manifest.added_tokens)} added to the base's")
        if self.ends:
            ends = ", ".join(f"{end.token} ({end.id})" for end in self.ends)
            lines.append(f"  ends     {ends}, beside the base's")
        if manifest.partial is not None:
            lines.append(f"  {manifest.partial.text}")
        if self.copies:
            named = f"the base's {', '.join(_sorted(self.copies))}"
            lines.append(f"  copies   of {named}: not compared; --base MODEL does that")
        lines += [f"  template {name}: {form}" for name, form in self.templates.items()]
        return "".join(f"{line}\n" for line in lines)


def _sorted(names: Sequence[str]) -> list[str]:
    return sorted(set(names))


# Of the slab file that `pack` writes; a worker packs for its own arena.
PACK_ARENA_BYTES = 1 << 30


def run(arguments: argparse.Namespace, cache_dir: str) -> int:
    """Runs a command about adapters. The exit code. Raises AdapterError for what is not a list of
    violations, OptionError.
    """
    try:
        return _report(arguments, _carry_out(arguments, Path(cache_dir)), 0)
    except (CheckpointError, ModelError) as error:
        sys.stderr.write(f"loraplex: {error}\n")
        return 1
    except AdapterError as error:
        if not error.violations:
            raise
        return _report(arguments, Report(arguments.ref, None, violations=error.violations), 1)


def _carry_out(arguments: argparse.Namespace, cache_dir: Path) -> Report:
    action, ref = arguments.action, arguments.ref
    if action == "pack":
        _check_out(Path(arguments.out))
    elif action == "convert":
        check_new_folder(arguments.out)
    limits = AdapterLimits(
        allow_other_base=arguments.allow_other_base, text_part_only=arguments.text_part_only
    )
    base = _base(arguments)
    if action == "check":
        return _report_of(ref, _check(ref, base, limits), arguments.base)
    if action == "convert":
        folder = None if arguments.base is None else _model_folder(arguments.base).path
        judged, conversion = convert(arguments, base, limits, folder, _ties_head(folder))
        return _report_of(arguments.out, judged, arguments.base, conversion)
    assert base is not None
    store = _store(ref, cache_dir, base, limits)
    manifest = store.admit(_ref(ref), get_token(), None, _say_stage)
    if action == "pack":
        _pack(store, manifest, base, arguments)
    return Report(ref, manifest, templates=_template_forms(manifest.template))


def _report_of(
    ref: str, judged: Judged, model: str | None, conversion: Conversion | None = None
) -> Report:
    """Report an adapter that can be served. model: the base's folder or name, if given."""
    return Report(
        ref,
        judged.manifest,
        # Without a base there is nothing to compare the base's modules with.
        copies=[] if model else [module for module, _ in judged.tensors.base_copies],
        templates=_template_forms(judged.manifest.template),
        trained_on=judged.tensors.naming.words,
        conversion=conversion,
        ends=None if model is None else _ends_of(_model_folder(model).path, judged.manifest),
    )


def _report(arguments: argparse.Namespace, report: Report, code: int) -> int:
    """Writes it; the exit code."""
    for_programs: bool = getattr(arguments, "json", False)
    sys.stdout.write(report.written(for_programs=for_programs))
    return code


def _check_out(path: Path) -> None:
    """Refuse a place that cannot be written, before anything is fetched. Raises OptionError."""
    if os.path.isdir(path):
        raise OptionError(f"--out {path}: it is a folder; name a file")
    if not os.path.isdir(path.parent):
        raise OptionError(f"--out {path}: there is no folder {path.parent}")


def _base(arguments: argparse.Namespace) -> BaseSpec | None:
    """The base, with all names that its worker gives it. Raises OptionError."""
    model, names = arguments.base, arguments.model_names
    if model is None:
        if names:
            raise OptionError("--model-name names the base that --base says")
        if arguments.allow_other_base:
            raise OptionError("--allow-other-base is about the base that --base says")
        return None
    folder = _model_folder(model)
    demo = (BASE_NAME,) if is_demo_model(_place(model)) else ()
    return read_base_spec(folder.path, tuple(dict.fromkeys((*demo, *names, *folder.names))))


def _model_folder(model: str) -> ModelFolder:
    return find_model(_place(model), None)


def _place(model: str) -> str:
    return str(model_path()) if model == "demo" else model


def _ties_head(folder: Path | None) -> bool | None:
    """Whether the base's head is its embedding; None = not known."""
    return None if folder is None else read_config(folder).head.tied


def _folder(text: str) -> Path | None:
    """The folder that `text` means, if it means one here."""
    path = os.path.expanduser(text.removeprefix("local:"))
    return Path(path).absolute() if os.path.isdir(path) else None


def _ref(text: str) -> AdapterRef:
    folder = _folder(text)
    if folder is not None:
        return AdapterRef("local", local_name(str(folder)))
    if text.startswith(("local:", "/", "./", "../", "~")):
        raise AdapterError("not_found", f"there is no folder {text.removeprefix('local:')}")
    return parse_ref(text, default_source="hub")


def _check(text: str, base: BaseSpec | None, limits: AdapterLimits) -> Judged:
    folder = _folder(text)
    if folder is not None:
        return judge_folder(folder, base, limits)
    with _fetched(_ref(text), limits) as fetched:
        return judge_folder(fetched, base, limits)


@contextlib.contextmanager
def _fetched(ref: AdapterRef, limits: AdapterLimits) -> Iterator[Path]:
    """The files of an adapter elsewhere, for as long as they are looked at."""
    source, token = _sources(ref).get(ref.source), get_token()
    if source is None:
        raise AdapterError("bad_ref", f"{ref.name} is neither a folder here nor names a source")
    pinned = source.resolve(ref, token)
    listing = source.list_files(pinned, token)
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="loraplex-check-") as name:
        nearby = partial(source.adapters_in, pinned, token)
        small = small_files(listing, limits, findings, shown_place(pinned), nearby)
        findings.raise_if_any()
        for file in (*small, *weight_files(listing)):
            source.fetch_file(pinned, token, file, Path(name))
        yield Path(name)


def _store(text: str, cache_dir: Path, base: BaseSpec, limits: AdapterLimits) -> AdapterStore:
    return AdapterStore(cache_dir, base, _sources(_ref(text)), limits)


def _sources(ref: AdapterRef) -> dict[RefSource, Source]:
    """The sources that a command may read: whoever types a command may read what it names."""
    place = ref.name.partition("/")[0]
    return open_sources(
        roots=[Path(path_of_local(ref.name)).parent] if ref.source == "local" else [],
        s3_buckets=[place] if ref.source == "s3" else [],
        https_hosts=[place] if ref.source == "https" else [],
        modelscope_owners=[place] if ref.source == "modelscope" else [],
    )


def _pack(
    store: AdapterStore, manifest: AdapterManifest, base: BaseSpec, arguments: argparse.Namespace
) -> None:
    extent_bytes = choose_extent_bytes(base, arguments.dtype, PACK_ARENA_BYTES)
    source = store.open_slab(manifest.digest, arguments.dtype, extent_bytes)
    with contextlib.closing(source) as slab:
        memory = memoryview(bytearray(slab.layout.nbytes))
        places = one_after_another(slab.layout)
        slab.copy_runs(memory, places)
    try:
        write_slab_file(Path(arguments.out), slab.layout, memory, places)
    except OSError as error:
        message = f"--out {arguments.out} cannot be written: {error.strerror}"
        raise AdapterError("unavailable", message) from error


def _say_stage(stage: str) -> None:
    sys.stderr.write(f"{stage} ...\n")


def _ends_of(folder: Path, manifest: AdapterManifest) -> list[EndToken]:
    """Tokens that end its answers and not the base's. Raises CheckpointError."""
    card = model_card(folder, names=("base",), dtype="", device="", max_lora_rank=0)
    base = TextModel(card)

    async def find() -> list[EndToken]:
        sandbox = TemplateSandbox(1)
        try:
            model = await AdapterModels().of(base, manifest)
            return end_tokens(await AnswerEnds(sandbox).own(model, manifest), model.token_text)
        finally:
            await sandbox.close()

    return asyncio.run(find())


def _template_forms(template: AdapterTemplate | None) -> dict[str, MessageForm | str]:
    """How chat templates read messages, by name; a text says why a template cannot be used."""
    return {} if template is None else asyncio.run(_forms(template))


async def _forms(template: AdapterTemplate) -> dict[str, MessageForm | str]:
    # Tokens that the adapter does not name are the base's, whatever their texts.
    tokens: dict[str, str | None] = {name: f"<{name}>" for name in USUAL_TOKENS}
    known = {name: text for name, text in (tokens | template.special_tokens).items() if text}
    sandbox = TemplateSandbox(processes=1)
    found: dict[str, MessageForm | str] = {}
    try:
        for name, source in template.sources.items():
            try:
                found[name] = await sandbox.form(source, known)
            except (TemplateFault, RequestError) as error:
                found[name] = str(error)
    finally:
        await sandbox.close()
    return found
