"""Reports of `loraplex adapter check|pull|pack|convert`: for people, or as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loraplex.adapters.chat.conversation import MessageForm
from loraplex.adapters.errors import Violation
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.peft.tensor_names import WHOLE
from loraplex.launcher.convert.plan import Conversion
from loraplex.launcher.router_client import as_json
from loraplex.router.api.admin.adapters import EndToken, partial_of


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
        lines = [f"{self.ref} cannot be served: {count} reason{'s' if count > 1 else ''}"]
        lines += [f"  {v.code} at {v.where}: {v.message}" for v in self.violations]
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
