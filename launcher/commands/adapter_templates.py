"""Finds out how an adapter's chat templates read messages, in a separate process as a router
does."""

import asyncio

from loraplex.adapters.chat.conversation import MessageForm, TemplateFault
from loraplex.adapters.manifest import AdapterTemplate
from loraplex.adapters.peft.special_tokens import USUAL_TOKENS
from loraplex.router.call import RequestError
from loraplex.router.text.template_sandbox import TemplateSandbox


def template_forms(template: AdapterTemplate | None) -> dict[str, MessageForm | str]:
    """By the template's name; a text says why a template cannot be used."""
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
