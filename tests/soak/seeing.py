"""The demo as a base that reads pictures, for the certifying engine: files that say so, without a
tower."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from loraplex.launcher.demo import model_path
from loraplex.server.model.card import model_card
from loraplex.server.protocol import Grid, PictureSpan, VisionCard, read_picture_head
from tests.certifying.certificates import pictured_ids
from tests.router.pictures.seeing import data_url
from tests.server.pictures.files import written

_OPENS, _PLACE, _CLOSES = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Text of a picture in a prompt, before the picture has its placeholders.
IMAGE = _OPENS + _PLACE + _CLOSES
# Where the demo's template looks at the parts of a message.
_PARTS = "{% for part in message['content'] %}"
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_CONTEXT = 2048
_PICTURES, _KINDS = 24, ("PNG", "JPEG", "WEBP", "GIF")
_EMBEDDINGS, _TOWER = "model.embed_tokens.weight", "visual.patch_embed.proj.weight"


def save_seeing(folder: Path) -> None:
    """Makes the folder of the model. Adapters of the demo fit."""
    demo = model_path()
    text = json.loads((demo / "config.json").read_text())
    first = text["vocab_size"]
    text |= {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": first + 4,
        "max_position_embeddings": _CONTEXT,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    }
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2}
    config: dict[str, Any] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
        "vision_start_token_id": first,
        "image_token_id": first + 1,
        "vision_end_token_id": first + 2,
        "video_token_id": first + 3,
        **{name: text[name] for name in ("eos_token_id", "vocab_size", "tie_word_embeddings")},
    }
    written = json.loads((demo / "tokenizer_config.json").read_text())
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    for number, content in enumerate((_OPENS, _PLACE, _CLOSES, "<|video_pad|>"), first):
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        token = {"content": content, **flags, "special": True}
        tokenizer["added_tokens"].append({"id": number, **token})
        written["added_tokens_decoder"][str(number)] = token
    parts = "{% if part['type'] == 'image' %}" + IMAGE + "{% endif %}"
    written["chat_template"] = written["chat_template"].replace(_PARTS, _PARTS + parts)
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": written,
        "generation_config.json": json.loads((demo / "generation_config.json").read_text()),
        "preprocessor_config.json": _PROCESSOR,
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    embeddings = np.zeros((text["vocab_size"], text["hidden_size"]), np.float32)
    tensors = {_EMBEDDINGS: embeddings, _TOWER: np.zeros(1, np.float32)}
    save_file(tensors, folder / "model.safetensors")


@dataclass(frozen=True)
class Seen:
    """A picture that clients send. tokens: placeholders in a prompt."""

    url: str
    digest: str
    grid: Grid
    tokens: int


class Gallery:
    """Pictures of all kinds and many sizes. folder: of the model that sees them."""

    def __init__(self, folder: Path) -> None:
        vision = model_card(
            folder, names=("base",), dtype="float32", device="cpu", max_lora_rank=1
        ).vision
        assert vision is not None
        self._place = vision.token_id
        self.pictures = [self._seen(vision, number) for number in range(_PICTURES)]

    def _seen(self, vision: VisionCard, number: int) -> Seen:
        kind = _KINDS[number % len(_KINDS)]
        data = written(kind, "RGB", 40 + 5 * number, 130 - 4 * number, number)
        head = read_picture_head(data)
        grid = vision.grid(head.width, head.height)
        url = data_url(data, kind.lower())
        return Seen(url, sha256(data).hexdigest(), grid, vision.form.tokens(grid))

    def placed(self, ids: Sequence[int], seen: Sequence[Seen]) -> list[int]:
        """A prompt's ids as marks count them. ids: with one placeholder for each picture."""
        longer, spans, left = list[int](), list[PictureSpan](), list(seen)
        for token_id in ids:
            if token_id != self._place:
                longer.append(token_id)
                continue
            one = left.pop(0)
            spans.append(PictureSpan(len(longer), one.tokens, one.digest, one.grid))
            longer += [token_id] * one.tokens
        assert not left
        return pictured_ids(longer, spans)
