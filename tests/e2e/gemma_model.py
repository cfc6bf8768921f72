"""Tiny random models of Gemma 3 and Gemma 4 with tokenizer, processor file and an adapter, and
greedy answers of transformers about pictures."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.e2e.picture_chats import ADAPTER, ChatOracle
from tests.router.fake_worker import byte_alphabet
from tests.server.model.hub_models import SIZES, add_adapter, random_model

Kind = Literal["gemma3", "gemma4", "gemma4_unified"]
# Gemma 4 has modules around those of its encoder, which PEFT does not take.
_OF_IMAGES = r".*vision_tower.*(fc1|out_proj|\.linear)"
_LORA = {"r": 4, "lora_alpha": 2, "target_modules": rf".*language_model.*_proj|{_OF_IMAGES}"}
END, STARTS, TURN_ENDS, OPENS, CLOSES, IMAGE, VIDEO = range(258, 265)
_SPECIAL = ("<eos>", "<start_of_turn>", "<end_of_turn>")
# Tokens around a picture, and of its placeholders.
_OF_PICTURES = {
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "gemma4": ("<|image>", "<image|>", "<|image|>"),
}
_OF_PICTURES["gemma4_unified"] = _OF_PICTURES["gemma4"]
# Gemma 3's template without its checks. Gemma 4's writes a picture's placeholder for a picture.
_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}"
    "{% set prefix = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
        "initializer_range": 0.15,
    },
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 3360,
        "initializer_range": 0.15,
    },
}
_VISION["gemma4_unified"] = {"mm_embed_dim": 32, "output_proj_dims": 32, "initializer_range": 0.15}
_UNIFIED_PROCESSOR = "Gemma4UnifiedImageProcessor"
_SIDE = {"height": 32, "width": 32}


def _tokenizer(kind: Kind) -> Any:
    """Bytes, and lines that end one behind the other in one token, as Gemma's has them."""
    vocabulary = {char: byte for byte, char in enumerate(byte_alphabet())}
    line = byte_alphabet()[10]
    vocabulary |= {line * 2: 256, line * 3: 257}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(line, line), (line * 2, line)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    opens, closes, image = _OF_PICTURES[kind]
    tokenizer.add_special_tokens([*_SPECIAL, opens, closes, image])
    made: Any = PreTrainedTokenizerFast
    names = {"boi_token": opens, "eoi_token": closes, "image_token": image}
    saved = made(tokenizer_object=tokenizer, eos_token="<eos>", extra_special_tokens=names)
    saved.chat_template = _TEMPLATE.replace("IMAGE", opens if kind == "gemma3" else image)
    return saved


def _config(kind: Kind, **ignored: Any) -> Any:
    windowed, full = "sliding_attention", "full_attention"
    text: dict[str, Any] = {
        **SIZES,
        "vocab_size": VIDEO + 1,
        "eos_token_id": TURN_ENDS,
        "max_position_embeddings": 1024,
        "head_dim": 16,
        "sliding_window": 72,
        "layer_types": [windowed, full, full],
    }
    if kind == "gemma3":
        return Gemma3Config(
            text_config=text | {"query_pre_attn_scalar": 16},
            vision_config=_VISION[kind],
            image_token_index=IMAGE,
            boi_token_index=OPENS,
            eoi_token_index=CLOSES,
            mm_tokens_per_image=16,
        )
    text |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
    make: Any = Gemma4Config if kind == "gemma4" else Gemma4UnifiedConfig
    return make(
        text_config=text | {"global_head_dim": 16, "pad_token_id": 0},
        vision_config=_VISION[kind],
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=VIDEO,
        boi_token_id=OPENS,
        eoi_token_id=CLOSES,
    )


_MODELS: dict[str, Any] = {
    "gemma3": Gemma3ForConditionalGeneration,
    "gemma4": Gemma4ForConditionalGeneration,
    "gemma4_unified": Gemma4UnifiedForConditionalGeneration,
}


def save_gemma(folder: Path, kind: Kind) -> None:
    """Makes `base`, and the adapter in a folder of its name."""
    base = random_model(partial(_config, kind), _MODELS[kind], 5)
    base.save_pretrained(folder / "base")
    _tokenizer(kind).save_pretrained(folder / "base")
    _processor(kind).save_pretrained(folder / "base")
    if kind == "gemma4_unified":
        path = folder / "base" / "preprocessor_config.json"
        given = json.loads(path.read_text()) | {"image_processor_type": _UNIFIED_PROCESSOR}
        path.write_text(json.dumps(given))
    (folder / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": TURN_ENDS}))
    made: Any = add_adapter(base, ADAPTER, LoraConfig(**_LORA), 1)
    made.save_pretrained(str(folder), selected_adapters=[ADAPTER])


def _processor(kind: Kind) -> Any:
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size=_SIDE)
    return Gemma4ImageProcessorPil(max_soft_tokens=70)


def _merged(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Patches and places of tokens, of those that are nine times smaller."""
    made, places = list[torch.Tensor](), list[torch.Tensor]()
    for patches, of in zip(inputs["pixel_values"], inputs["image_position_ids"], strict=True):
        wide, high = (of.amax(0) + 1).tolist()
        found = patches[: high * wide].view(high // 3, 3, wide // 3, 3, 16, 16, 3)
        found = found.permute(0, 2, 1, 4, 3, 5, 6).reshape(high * wide // 9, -1)
        spots = torch.cartesian_prod(torch.arange(high // 3), torch.arange(wide // 3)).flip(1)
        rest = (0, 0, 0, len(of) // 9 - len(found))
        made.append(torch.nn.functional.pad(found, rest))
        places.append(torch.nn.functional.pad(spots, rest, value=-1))
    return {"pixel_values": torch.stack(made), "image_position_ids": torch.stack(places)}


class GemmaOracle(ChatOracle):
    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(folder, _MODELS[kind], _tokenizer(kind), (IMAGE, VIDEO))
        self._kind = kind
        self.processor = _processor(kind)

    def inputs(self, prompt: str, seen: list[Image.Image]) -> dict[str, Any]:
        if not seen:
            return {"input_ids": self.tokenizer([prompt], return_tensors="pt")["input_ids"]}
        if self._kind == "gemma3":
            whole = Gemma3Processor(self.processor, self.tokenizer, image_seq_length=16)
            return dict(whole(images=seen, text=prompt, return_tensors="pt"))
        inputs = dict(self.processor(seen, return_tensors="pt"))
        if self._kind == "gemma4_unified":
            inputs |= _merged(inputs)
        opens, closes, image = _OF_PICTURES["gemma4"]
        pieces = prompt.split(image)
        for number, count in enumerate(inputs.pop("num_soft_tokens_per_image"), 1):
            pieces[number] = f"{opens}{image * int(count)}{closes}{pieces[number]}"
        ids = self.tokenizer(["".join(pieces)], return_tensors="pt")["input_ids"]
        return {**inputs, "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
