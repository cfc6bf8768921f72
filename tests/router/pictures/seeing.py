"""A fake worker's model that reads pictures: byte tokens, and three for a picture."""

import base64
from typing import Any

import msgspec

from loraplex.server.protocol import ModelCard
from tests.router.fake_worker import make_card, make_tokenizer
from tests.server.pictures.cards import QWEN
from tests.server.pictures.files import written

OPENS, PLACE, CLOSES = 258, 259, 260
# Of 28 x 28 pixels a token; four tokens are the fewest.
SMALL = written("PNG", "RGB", 56, 56, 1)
WIDE = written("JPEG", "RGB", 112, 56, 2)
TURNED = written("JPEG", "RGB", 84, 112, 3, 6)  # 112 wide, 84 high
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<img><pic></img>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def seeing_card(**changes: object) -> ModelCard:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<img>", "<pic>", "</img>"])
    ids = {"token_id": PLACE, "opens_id": OPENS, "closes_id": CLOSES}
    own: dict[str, object] = {
        "tokenizer_json": tokenizer.to_str(),
        "chat_template": _TEMPLATE,
        "vocab_size": 261,
        "vision": msgspec.structs.replace(QWEN, **ids),
    }
    return make_card(**(own | changes))


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chat_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
