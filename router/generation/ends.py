"""The tokens that end an answer: those of the base, and those of the adapter that speaks.

What a template of an adapter closes a turn with is looked for once, and kept by its content.
"""

import hashlib

import msgspec

from loraplex.adapters.chat.conversation import PROBES, Probe, TemplateFault, turn_ends
from loraplex.adapters.common.recent import Recent
from loraplex.adapters.manifest import AdapterManifest, OwnToken
from loraplex.router.text.model import TextModel
from loraplex.router.text.template_sandbox import TemplateSandbox

_MAX_KEPT = 16_384


class AnswerEnds:
    """Finds the ids of tokens that end an answer: the base's, and an adapter's own.

    The base's are in its card. The adapter's are in its manifest, or close the turns that its
    templates render in the sandbox.
    """

    def __init__(self, sandbox: TemplateSandbox) -> None:
        self._sandbox = sandbox
        self._found: Recent[bytes, tuple[int, ...]] = Recent(_MAX_KEPT)

    async def of(self, model: TextModel, manifest: AdapterManifest | None) -> tuple[int, ...]:
        """Ids, ascending: the base's, and with a manifest the adapter's own, of which model is.
        Raises RequestError (unavailable) when no template can be rendered now."""
        own = () if manifest is None else await self.own(model, manifest)
        return tuple(sorted((*model.card.eos_token_ids, *own)))

    async def own(self, model: TextModel, manifest: AdapterManifest) -> tuple[int, ...]:
        """Ids of the adapter's that are not the base's, ascending. Raises as `of`."""
        ends = set(manifest.end_token_ids or ())
        template = manifest.template
        if template is not None:
            tokens = {**model.card.special_tokens, **template.special_tokens}
            known = {name: text for name, text in tokens.items() if text is not None}
            for source in template.sources.values():
                ends.update(await self._of_template(model, source, known, manifest.added_tokens))
        return tuple(sorted(ends.difference(model.card.eos_token_ids)))

    async def _of_template(
        self,
        model: TextModel,
        source: str,
        tokens: dict[str, str],
        own: tuple[OwnToken, ...],
    ) -> tuple[int, ...]:
        """The tokens that end a template's turns, found once. own: added by the adapter."""
        said = (model.card.base_digest, source, tokens, own)
        key = hashlib.sha256(msgspec.json.encode(said, order="sorted")).digest()
        ends = self._found.get(key)
        if ends is None:
            rendered = [await self._render(model, source, tokens, probe) for probe in PROBES]
            added = {token.content: i for i, token in model.added_tokens().items()}
            ends = turn_ends(rendered, added)
            if any(text is not None for text in rendered):  # else it may only be slow just now
                self._found.put(key, ends)
        return ends

    async def _render(
        self, model: TextModel, source: str, tokens: dict[str, str], probe: Probe
    ) -> str | None:
        asked = (source, tokens, probe.messages, probe.options)
        try:
            return await self._sandbox.render(*asked, model.turns)
        except TemplateFault:
            return None
