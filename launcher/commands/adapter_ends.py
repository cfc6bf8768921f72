"""The tokens that end an adapter's answers, as a router finds them."""

import asyncio
from pathlib import Path

from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.api.ends import EndToken, end_tokens
from loraplex.router.generation.answer_ends import AnswerEnds
from loraplex.router.text.adapter_models import AdapterModels
from loraplex.router.text.model import TextModel
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.server.model.card import model_card


def ends_of(folder: Path, manifest: AdapterManifest) -> list[EndToken]:
    """Those beside its base's. folder: of the base. Raises CheckpointError."""
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
