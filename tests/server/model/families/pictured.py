"""Tiny models that read pictures, their pictures, and transformers' answers to both."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from peft import LoraConfig, PeftModel
from torch.nn import functional
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from loraplex.server.engine.executor import PictureIn
from loraplex.server.model.tower.geometry import patch_places
from loraplex.server.protocol import GenerateRequest, PictureSpan, TiledForm, TokenEvent
from tests.server.engine.harness import make_request
from tests.server.model.driver import Driver, by_token
from tests.server.model.driver import Packed as AnyPacked
from tests.server.model.engine import Engine
from tests.server.model.hub_models import SIZES, VOCAB, add_adapter, random_model, save_model
from tests.server.model.slabs import pack
from tests.server.pictures.cards import TILED

TOKEN, OPENS, CLOSES, VIDEO, BREAK, AUDIO = 90, 92, 93, 91, 94, 95
TOLERANCE = 1e-4
PATCH = 4
TILES = TiledForm(tile=3, tilings=((1, 2), (2, 1), (1, 1)))
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "initializer_range": 0.15,
}
_ENCODER: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "initializer_range": 0.15,
}
_TURNED = {"rope_type": "default", "rope_theta": 1e4}
ROPE = {**_TURNED, "mrope_section": [2, 3, 3]}
LORA: dict[str, Any] = {
    "one": {"r": 3, "target_modules": r".*(language|text)_model.*(q_proj|v_proj)"},
    "two": {"r": 4, "lora_alpha": 4, "target_modules": r".*(language|text)_model.*_proj(_[a-z]+)?"},
}
_TIMEOUT_S = 60.0


_IDS: dict[str, Any] = {
    "image_token_id": TOKEN,
    "video_token_id": VIDEO,
    "vision_start_token_id": OPENS,
    "vision_end_token_id": CLOSES,
    "tie_word_embeddings": False,
}


def qwen2(**text: Any) -> Qwen2VLConfig:
    vision = {**VISION, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": text["hidden_size"]}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **_IDS)


def qwen25(**text: Any) -> Qwen2_5_VLConfig:
    vision = {**VISION, "window_size": 24, "fullatt_block_indexes": [1, 3]}
    vision |= {"out_hidden_size": text["hidden_size"]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)


def llava(strategy: Literal["default", "full"], kind: str = "clip", **text: Any) -> LlavaConfig:
    vision = {**_ENCODER, "image_size": 4 * PATCH + (kind != "clip")}
    vision |= {"model_type": f"{kind}_vision_model"}
    # The sections are of other kinds.
    text |= {"model_type": "llama", "rope_parameters": _TURNED}
    return LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=TOKEN,
        tie_word_embeddings=False,
        vision_feature_select_strategy=strategy,
    )


def llava_next(kind: str = "clip", **text: Any) -> LlavaNextConfig:
    beside = llava("default" if kind == "clip" else "full", kind, **text).to_dict()
    side = TILES.tile * PATCH + (kind != "clip")
    beside["vision_config"]["image_size"] = side
    beside["image_grid_pinpoints"] = [[side * high, side * wide] for high, wide in TILES.tilings]
    return LlavaNextConfig(**{k: v for k, v in beside.items() if k != "model_type"})


def pixtral(config: Any, **text: Any) -> Any:
    text |= {"model_type": "mistral", "sliding_window": None, "rope_parameters": _TURNED}
    beside = {"vision_feature_select_strategy": "full"} if config is LlavaConfig else {}
    return config(
        text_config=text,
        vision_config={**_ENCODER, "model_type": "pixtral"},
        image_token_index=TOKEN,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **beside,
    )


def gemma3(**text: Any) -> Gemma3Config:
    vision = {**_ENCODER, "image_size": 8 * PATCH, "model_type": "siglip_vision_model"}
    del text["rope_parameters"]
    text = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16} | text
    layers = text["num_hidden_layers"]
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"][:layers]}
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=TOKEN,
        boi_token_index=OPENS,
        eoi_token_index=CLOSES,
        mm_tokens_per_image=16,
    )


_GEMMA4_IDS: dict[str, Any] = {
    "audio_config": None,
    "image_token_id": TOKEN,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "boi_token_id": OPENS,
    "eoi_token_id": CLOSES,
}


def gemma4(vision: Mapping[str, Any], shared: int = 0, **text: Any) -> Gemma4Config:
    """vision: further values of the encoder's. shared: last layers that read keys of others."""
    del text["rope_parameters"]
    sizes = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 12}
    sizes |= {"pooling_kernel_size": 2, "position_embedding_size": 2240}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    if shared:
        kinds = ["sliding_attention", "full_attention"] * 2
        text["num_hidden_layers"] = 4
    is_large = vision.get("standardize", False)
    inputs = 10 * (shared > 0 or not is_large)
    text = {
        "layer_types": kinds[: text["num_hidden_layers"]],
        "num_kv_shared_layers": shared,
        "head_dim": 12,
        "global_head_dim": 20,
        "sliding_window": 7,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": text["vocab_size"],
        "use_bidirectional_attention": "vision" if is_large else None,
        "pad_token_id": 0,
    } | text
    return Gemma4Config(
        text_config=text,
        vision_config={**sizes, **vision},
        **_GEMMA4_IDS,
    )


def unified(**text: Any) -> Gemma4UnifiedConfig:
    del text["rope_parameters"]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    text = {"layer_types": kinds[: text["num_hidden_layers"]], "head_dim": 12} | text
    text = {"global_head_dim": 20} | text
    text |= {"sliding_window": 20, "pad_token_id": 0}
    vision: dict[str, Any] = {"patch_size": PATCH // 2, "pooling_kernel_size": 2}
    vision |= {"mm_posemb_size": 1120}
    vision |= {"mm_embed_dim": 32, "output_proj_dims": 32, "initializer_range": 0.15}
    return Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision,
        **_GEMMA4_IDS,
    )


def qwen3(config: Any = Qwen3VLConfig, **text: Any) -> Any:
    vision = {**VISION, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 25}
    vision |= {"deepstack_visual_indexes": [0, 2]}
    return config(text_config={**text, "head_dim": 16}, vision_config=vision, **_IDS)


def qwen3_moe(**text: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return qwen3(Qwen3VLMoeConfig, **text, **experts)


def qwen35(config: Any = Qwen3_5Config, **text: Any) -> Any:
    """Each third layer attends, and turns a part of each head."""
    mixers = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
    mixers |= {"linear_value_head_dim": 12, "full_attention_interval": 3, "head_dim": 32}
    rope = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    vision = {**VISION, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 25}
    # Wider weights would let float32 differ from itself by the tolerance.
    text |= {"rope_parameters": rope, "initializer_range": 0.1, **mixers}
    return config(text_config=text, vision_config=vision, **_IDS)


def qwen35_moe(**text: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return qwen35(Qwen3_5MoeConfig, **text, **experts, shared_expert_intermediate_size=40)


def tiled(config: Any, vision: dict[str, Any], **text: Any) -> Any:
    """A tile has four by four patches, and more pixels than those of its patches."""
    text |= {"model_type": "llama", "rope_parameters": _TURNED}
    ids = {"image_token_id": TOKEN, "tie_word_embeddings": False}
    return config(text_config=text, vision_config={**_ENCODER, **vision}, **ids)


_UNEVEN = {"image_size": 4 * PATCH + 1}
_INTERN = {"image_size": 4 * PATCH, "layer_scale_init_value": 0.7, "attention_bias": True}
# InternVL's parameters that transformers makes zero or constant.
_ZEROS = ("cls_token", "position_embeddings", "lambda_1", "lambda_2")
STATEFUL = ("qwen3_5", "qwen3_5_moe")
KINDS: dict[str, tuple[Any, Any]] = {
    "gemma3": (gemma3, Gemma3ForConditionalGeneration),
    "gemma4": (partial(gemma4, {"standardize": True}), Gemma4ForConditionalGeneration),
    "gemma4_shared": (partial(gemma4, {"standardize": True}, 2), Gemma4ForConditionalGeneration),
    "gemma4_unified": (unified, Gemma4UnifiedForConditionalGeneration),
    "gemma4_small": (
        partial(gemma4, {"use_clipped_linears": True}),
        Gemma4ForConditionalGeneration,
    ),
    "idefics3": (partial(tiled, Idefics3Config, _UNEVEN), Idefics3ForConditionalGeneration),
    "internvl": (partial(tiled, InternVLConfig, _INTERN), InternVLForConditionalGeneration),
    "llava": (partial(llava, "default"), LlavaForConditionalGeneration),
    "llava_siglip": (partial(llava, "full", "siglip"), LlavaForConditionalGeneration),
    "llava_full": (partial(llava, "full"), LlavaForConditionalGeneration),
    "llava_next": (llava_next, LlavaNextForConditionalGeneration),
    "llava_next_siglip": (partial(llava_next, "siglip"), LlavaNextForConditionalGeneration),
    "llava_pixtral": (partial(pixtral, LlavaConfig), LlavaForConditionalGeneration),
    "mistral3": (partial(pixtral, Mistral3Config), Mistral3ForConditionalGeneration),
    "qwen2_5_vl": (qwen25, Qwen2_5_VLForConditionalGeneration),
    "qwen2_vl": (qwen2, Qwen2VLForConditionalGeneration),
    "qwen3_5": (qwen35, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (qwen35_moe, Qwen3_5MoeForConditionalGeneration),
    "qwen3_vl": (qwen3, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (qwen3_moe, Qwen3VLMoeForConditionalGeneration),
    "smolvlm": (partial(tiled, SmolVLMConfig, _UNEVEN), SmolVLMForConditionalGeneration),
}


_BUFFERS = {
    "input_min": (-1.5, -0.5),
    "input_max": (0.5, 1.5),
    "output_min": (-1.5, -0.5),
    "output_max": (0.5, 1.5),
    "std_bias": (-1.0, 1.0),
    "std_scale": (0.5, 1.5),
}


def make_pictured(kind: str = "qwen2_5_vl", **text: Any) -> PreTrainedModel:
    """kind: of KINDS."""
    sizes = {**SIZES, "rope_parameters": ROPE, **text}
    model = random_model(*KINDS[kind], **sizes)
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():  # of Gemma 4, which transformers makes of no effect
        *_, last = name.split(".")
        if last in _BUFFERS:
            least, most = _BUFFERS[last]
            buffer.uniform_(least, most, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_ZEROS):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


class Picture:
    """Patches as a processor gives them; grid: by (time, height, width). side: of the square of
    patches that becomes a token. added: tokens beside those of patches. has_breaks: a further token
    stands between its rows. frames: of a patch; 1 = transformers takes pixels."""

    def __init__(
        self,
        name: str,
        height: int = 0,
        width: int = 0,
        side: int = 2,
        frames: int = 2,
        added: int = 0,
        has_breaks: bool = False,
    ) -> None:
        self.name, self.grid = name, (1, height, width)
        self.side, self.added, self.has_breaks = side, added, has_breaks
        self.frames = frames
        self.columns = 3 * frames * PATCH**2
        self.draw(height * width)

    def draw(self, patches: int) -> None:
        seed = int.from_bytes(self.name.encode()[:4], "little")
        generator = torch.Generator().manual_seed(seed)
        self.patches = torch.randn(patches, self.columns, generator=generator)

    @property
    def ids(self) -> list[int]:
        high, wide = (patches // self.side for patches in self.grid[1:])
        if self.has_breaks:
            return ([*[TOKEN] * wide, BREAK] * high)[:-1]
        return [TOKEN] * (high * wide + self.added)

    @property
    def pixels(self) -> torch.Tensor:
        """Pixels that patches of one frame were cut from: `[3, height, width]`."""
        side, (high, wide) = self.side, self.grid[1:]
        cut = self.patches.view(high // side, wide // side, side, side, 3, PATCH, PATCH)
        return cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, high * PATCH, wide * PATCH)


class PaddedPicture(Picture):
    """Tiles of `side` pixels, of a picture of so many pixels."""

    def __init__(self, name: str, width: int, height: int, side: int) -> None:
        super().__init__(name, side=1, frames=1)
        self.size = height, width
        tiled = msgspec.structs.replace(TILED, patch_size=PATCH, crop_size=side, form=TILES)
        self.grid = tiled.grid(width, height)
        self.draw(TILES.patches(self.grid))

    @property
    def ids(self) -> list[int]:
        return [TOKEN] * TILES.tokens(self.grid)

    @property
    def pixels(self) -> torch.Tensor:
        """Pixels of the tiles: `[tiles, 3, height, width]`."""
        cut = self.patches.view(-1, TILES.tile, TILES.tile, 3, PATCH, PATCH)
        return cut.permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3)


class StretchedPicture(Picture):
    """A picture of tiles of four by four patches, and all of it behind several. has_breaks: a
    further token stands before each but the first."""

    def __init__(self, name: str, rows: int, columns: int, has_breaks: bool) -> None:
        self.count = rows * columns + (rows * columns > 1)
        super().__init__(name, 4 * self.count, 4, frames=1)
        self.grid, self.has_breaks = (1, 4 * rows, 4 * columns), False
        before = [BREAK] * has_breaks
        self._ids = ([*before, *[TOKEN] * 4] * self.count)[len(before) :]

    @property
    def ids(self) -> list[int]:
        return self._ids

    @property
    def tiles(self) -> torch.Tensor:
        """Tiles from which patches were cut: `[tiles, 3, side, side]`."""
        cut = self.patches.view(self.count, 2, 2, 2, 2, 3, PATCH, PATCH)
        return cut.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(self.count, 3, 4 * PATCH, 4 * PATCH)


_GRIDS = {"a": (6, 10), "b": (8, 4), "c": (2, 2), "d": (4, 16), "e": (12, 6)}
PICTURES = {name: Picture(name, *size) for name, size in _GRIDS.items()}
# Beginnings of names, of kinds that read other pictures.
SQUARES = {
    "gemma3": "pooled square of ",
    "llava": "square of ",
    "llava_siglip": "square of ",
    "llava_full": "square and row of ",
}
_SQUARES: dict[str, dict[str, Any]] = {
    "pooled square of ": {"height": 8, "width": 8, "side": 2},
    "square of ": {"height": 4, "width": 4, "side": 1},
    "square and row of ": {"height": 4, "width": 4, "side": 1, "added": 1},
}
# Most tokens of a picture whose tokens see each other.
_JOINED = 18
PICTURES |= {
    before + name: Picture(name + before, frames=1, **sizes)
    for before, sizes in _SQUARES.items()
    for name in _GRIDS
}

ROWS = {"llava_pixtral": "fine rows of ", "mistral3": "rows of "}
PICTURES |= {
    before + name: Picture(
        name + before, high * side // 2, wide * side // 2, side, frames=1, has_breaks=True
    )
    for side, before in enumerate(ROWS.values(), 1)
    for name, (high, wide) in _GRIDS.items()
}
TILED_KINDS = {"llava_next": "tiles of ", "llava_next_siglip": "odd tiles of "}
_SIZES = {"a": (31, 17), "b": (9, 30), "c": (7, 7), "d": (60, 12), "e": (20, 33)}
PICTURES |= {
    before + name: PaddedPicture(name + before, *size, side=TILES.tile * PATCH + more)
    for more, before in enumerate(TILED_KINDS.values())
    for name, size in _SIZES.items()
}


POOLED = dict.fromkeys(("gemma4", "gemma4_shared", "gemma4_small"), "pooled ")
PICTURES |= {
    "pooled " + name: Picture("pooled " + name, *size, frames=1) for name, size in _GRIDS.items()
}
POOLED["gemma4_unified"] = "large patches of "
PICTURES |= {
    "large patches of " + name: Picture("large" + name, high // 2, wide // 2, side=1, frames=1)
    for name, (high, wide) in _GRIDS.items()
}
_SHAPES = {"a": (1, 2), "b": (1, 1), "c": (1, 1), "d": (2, 1), "e": (2, 2)}
STRETCHED = {
    "internvl": "stretched tiles of ",
    "idefics3": "named tiles of ",
    "smolvlm": "named tiles of ",
}
PICTURES |= {
    before + name: StretchedPicture(name + before, *shape, has_breaks=bool(number))
    for number, before in enumerate(dict.fromkeys(STRETCHED.values()))
    for name, shape in _SHAPES.items()
}
BEFORE = SQUARES | ROWS | TILED_KINDS | POOLED | STRETCHED


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TOKEN, (length,), generator=generator).tolist()


def pictured(parts: Sequence[list[int] | str], **changes: Any) -> GenerateRequest:
    """parts: texts, and names of pictures between them."""
    ids, spans = list[int](), list[PictureSpan]()
    for part in parts:
        if isinstance(part, str):
            picture = PICTURES[part]
            spans.append(PictureSpan(len(ids) + 1, len(picture.ids), part, picture.grid))
            ids += [OPENS, *picture.ids, CLOSES]
        else:
            ids += part
    wishes: dict[str, Any] = {"temperature": 0.0, "logprobs": VOCAB, "prompt_logprobs": 0}
    # transformers takes no placeholder that was drawn.
    wishes |= {
        "ignore_eos": True,
        "logit_bias": dict.fromkeys((TOKEN, VIDEO, AUDIO), -1e6),
        **changes,
    }
    return make_request(ids, pictures=tuple(spans), **wishes)


def sized_inputs(pictures: Sequence[Picture], config: Any) -> dict[str, torch.Tensor]:
    """Pixels and sizes of PaddedPictures and of pictures with breaks, as transformers takes them.
    config: of the model."""
    more = config.vision_config.image_size - TILES.tile * PATCH
    of_tile = more if isinstance(pictures[0], PaddedPicture) else 0
    pixels = [functional.pad(each.pixels, (0, of_tile, 0, of_tile)) for each in pictures]
    sizes = [
        each.size if isinstance(each, PaddedPicture) else each.pixels.shape[1:] for each in pictures
    ]
    most = torch.tensor([each.shape for each in pixels]).amax(0).tolist()
    filled = torch.stack([each.new_zeros(most) for each in pixels])
    for place, each in zip(filled, pixels, strict=True):
        place[tuple(slice(length) for length in each.shape)] = each
    return {"pixel_values": filled, "image_sizes": torch.tensor(sizes)}


def of_gemma4(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Patches, whose order means nothing, and their columns and rows; filled up to the most."""
    most = max(len(picture.patches) for picture in pictures)
    pixels, places = list[torch.Tensor](), list[torch.Tensor]()
    for picture in pictures:
        of = torch.from_numpy(patch_places(picture.grid, picture.side)).flip(0).T
        rest = (0, 0, 0, most - len(of))
        pixels.append(torch.nn.functional.pad(picture.patches, rest))
        places.append(torch.nn.functional.pad(of, rest, value=-1))
    return {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


def tiles_of(pictures: Sequence[Picture], pixels: int | tuple[int, int]) -> torch.Tensor:
    """Pixels of tiles as transformers takes them. pixels: a tile's side for Idefics3 and SmolVLM,
    else both sides."""
    tiles = torch.cat(
        [picture.tiles for picture in pictures if isinstance(picture, StretchedPicture)]
    )
    if not isinstance(pixels, int):
        return tiles
    beyond = pixels - tiles.shape[-1]
    return torch.nn.functional.pad(tiles, (0, beyond, 0, beyond))[None]


def picture_inputs(config: Any, request: GenerateRequest, count: int) -> dict[str, Any]:
    """Inputs of transformers for a request's pictures. count: tokens."""
    of = [PICTURES[span.picture] for span in request.pictures]
    inputs = dict[str, Any]()
    kinds = torch.zeros(1, count, dtype=torch.int64)
    for span in request.pictures:
        kinds[0, span.start : span.start + span.length] = 1
    if config.model_type == "gemma3":
        inputs["token_type_ids"] = kinds
    if isinstance(of[0], PaddedPicture) or of[0].has_breaks:
        inputs |= sized_inputs(of, config)
    elif config.model_type in ("gemma4", "gemma4_unified"):
        inputs |= {**of_gemma4(of), "mm_token_type_ids": kinds}
        if config.model_type == "gemma4":  # which scales them
            inputs["pixel_values"] = inputs["pixel_values"] / 2 + 0.5
    elif isinstance(of[0], StretchedPicture):
        inputs["pixel_values"] = tiles_of(of, config.vision_config.image_size)
    elif of[0].frames == 1:
        side = config.vision_config.image_size
        beside = (0, side - of[0].pixels.shape[2], 0, side - of[0].pixels.shape[1])
        pixels = torch.stack([picture.pixels for picture in of])
        inputs["pixel_values"] = functional.pad(pixels, beside)
    else:
        inputs |= {
            "pixel_values": torch.cat([picture.patches for picture in of]),
            "image_grid_thw": torch.tensor([picture.grid for picture in of]),
            "mm_token_type_ids": kinds,
        }
    return inputs


@torch.inference_mode()
def reference(
    model: PreTrainedModel | PeftModel,
    adapter: str | None,
    request: GenerateRequest,
    ids: Sequence[int],
) -> torch.Tensor:
    """Log-softmax after every token, float32 `[tokens, vocab]`."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if request.pictures:
        inputs |= picture_inputs(model.config, request, len(ids))
    if isinstance(model, PeftModel):
        if adapter is None:
            with model.disable_adapter():
                logits = model(**inputs).logits
        else:
            model.set_adapter(adapter)
            logits = model(**inputs).logits
    else:
        logits = model(**inputs).logits
    scores: torch.Tensor = logits[0].float().log_softmax(-1)
    return scores


class Packed:
    """An adapter's slab."""

    def __init__(self, layout: Any, slab: bytes) -> None:
        self.layout, self.slab = layout, slab


class PicturedEngine(Engine):
    """Pictures' patches lie at the end of the driver's host memory."""

    def __init__(self, driver: Driver, adapters: Mapping[str, AnyPacked], **options: Any) -> None:
        """options: as of Engine. Steps have room for a picture whose tokens see each other."""
        pictures = driver.executor.limits.pictures
        if "max_step_tokens" in options and pictures is not None and pictures.is_joined:
            options["max_step_tokens"] = max(options["max_step_tokens"], _JOINED + 4)
            options |= {"max_rows": 4, "max_decodes": 0}
        super().__init__(driver, adapters, **options)
        self.grids = {name: picture.grid for name, picture in PICTURES.items()}
        self._segments = defaultdict[str, list[int]](list)
        end = len(driver.arena)
        for name, picture in [*PICTURES.items()] * 5:
            patches = picture.patches.numpy().tobytes()
            driver.arena[end - len(patches) : end] = patches
            end -= len(patches)
            self._segments[name].append(end)

    def segment(self, picture: str) -> int:
        places = self._segments[picture]
        places.append(places.pop(0))  # the others may be on their way
        return places[-1]

    def _read_pictures(self) -> bool:
        """Patches are on their way on a thread, and here nothing else may happen meanwhile."""
        pictures = self.scheduler.pictures
        until = time.monotonic() + _TIMEOUT_S
        while pictures.busy and not pictures.next_work() and pictures._started:
            news: list[PictureIn] = self.executor.poll_pictures()
            for item in news:
                self.scheduler.picture_news(item)
            assert time.monotonic() < until, "patches do not come"
            time.sleep(0 if news else 0.0005)
        self.exchange()
        return super()._read_pictures()


class Pictured:
    """A base and its adapters, served, and as transformers and PEFT have them."""

    def __init__(
        self,
        folder: Path,
        make_driver: Any = Driver,
        shards: int = 1,
        kind: str = "qwen2_5_vl",
        lora: Mapping[str, Any] | None = None,
        base: PreTrainedModel | None = None,
    ) -> None:
        """lora: configs of adapters by name; None = LORA. base: whose folder it is; None = one that
        is made and saved there."""
        if base is None:
            base = make_pictured(kind)
            save_model(base, folder)
        self.has_states = kind in STATEFUL
        self._before = BEFORE.get(kind, "")
        self.driver: Driver = make_driver(folder)
        model: PreTrainedModel | PeftModel = base
        for seed, (name, config) in enumerate((lora or LORA).items(), 1):
            model = add_adapter(model, name, LoraConfig(**config), seed)
        assert isinstance(model, PeftModel)
        self.oracle = model
        names = [*self.oracle.peft_config]
        self.packed = {name: Packed(*pack(self.oracle, name, shards=shards)) for name in names}
        self.names = {each.layout.digest: name for name, each in self.packed.items()}

    def name(self, picture: str) -> str:
        """The name among PICTURES of one that the model reads."""
        return self._before + picture

    def pictured(self, parts: Sequence[list[int] | str], **changes: Any) -> GenerateRequest:
        own = [self.name(part) if isinstance(part, str) else part for part in parts]
        return pictured(own, **changes)

    def digest(self, name: str | None) -> str | None:
        return None if name is None else self.packed[name].layout.digest

    def engine(self, **options: Any) -> PicturedEngine:
        return PicturedEngine(self.driver, self.packed, **options)

    def assert_answers(self, engine: Engine, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests together, run the engine until it rests, and check all their answers."""
        keys = {engine.submit(request): request for request in requests}
        engine.run()
        self.assert_right(engine, keys)
        engine.assert_at_rest()

    def assert_right(self, engine: Engine, keys: Mapping[int, GenerateRequest]) -> None:
        """All have ended, with the logprobs of transformers and PEFT at every place."""
        for key, request in keys.items():
            assert engine.last(key).finish == "length", engine.last(key)
            output = engine.tokens(key)
            ids = [*request.prompt_ids, *request.accepted_ids, *output]
            name = None if request.adapter is None else self.names[request.adapter]
            expected = reference(self.oracle, name, request, ids)
            self._assert_near(engine.events[key], request, output, expected)

    def _assert_near(
        self,
        events: Sequence[TokenEvent],
        request: GenerateRequest,
        output: list[int],
        expected: torch.Tensor,
    ) -> None:
        first = len(request.prompt_ids) + len(request.accepted_ids) - 1
        found = [each for event in events for each in event.logprobs or ()]
        assert len(found) == len(output)
        for place, each in enumerate(found, first):
            row = by_token(each, expected.shape[1])
            assert (row - expected[place]).abs().max().item() < TOLERANCE
        scored = events[0].prompt_logprobs or ()
        assert len(scored) == (0 if request.accepted_ids else len(request.prompt_ids))
        of_pictures = {
            at for span in request.pictures for at in range(span.start, span.start + span.length)
        }
        for place, logprob in enumerate(scored[1:]):
            if place + 1 in of_pictures:
                assert logprob.logprob is None
            else:
                wanted = expected[place, logprob.token_id].item()
                assert logprob.logprob is not None
                assert abs(logprob.logprob - wanted) < TOLERANCE
