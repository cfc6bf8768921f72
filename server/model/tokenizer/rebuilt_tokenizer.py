"""Tokenizers that transformers builds anew: of tokenizer.json they have the vocabulary, the merges
and the post-processor; the steps between are the class's own. No torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from loraplex.server.model.tokenizer.tokenizer_class import RebuiltClass

Settings = Mapping[str, Any]


def _tokens(**texts: str) -> dict[str, str]:
    return {f"{name}_token": text for name, text in texts.items()}


_END = "<|endoftext|>"
# Special tokens of a class where the settings do not name any.
DEFAULT_TOKENS: dict[RebuiltClass, dict[str, str]] = {
    "LlamaTokenizer": _tokens(unk="<unk>", bos="<s>", eos="</s>"),
    "CodeLlamaTokenizer": _tokens(unk="<unk>", bos="<s>", eos="</s>", prefix="▁<PRE>")
    | _tokens(middle="▁<MID>", suffix="▁<SUF>", eot="▁<EOT>", fill="<FILL_ME>"),
    "GemmaTokenizer": _tokens(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>"),
    "Qwen2Tokenizer": _tokens(unk=_END, eos=_END, pad=_END),
    "Qwen3_5Tokenizer": _tokens(unk=_END, eos=_END, pad=_END),
    "GPT2Tokenizer": _tokens(unk=_END, bos=_END, eos=_END),
    "GPTNeoXTokenizer": _tokens(unk=_END, bos=_END, eos=_END, pad="<|padding|>"),
    "CohereTokenizer": _tokens(unk="<UNK>", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>")
    | _tokens(pad="<PAD>", cls="<CLS>", sep="<SEP>", mask="<MASK_TOKEN>"),
}
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Steps(NamedTuple):
    """Steps of a tokenizer around its vocabulary. model: how the vocabulary is read."""

    model: dict[str, Any]
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer
    decoder: decoders.Decoder


def rebuilt(
    name: RebuiltClass, document: Mapping[str, Any], settings: Settings, read: Tokenizer
) -> Tokenizer:
    """A tokenizer without added tokens.

    document: tokenizer.json, of a BPE. settings: special tokens among them, as texts. read: what
    the file is as it stands.
    """
    steps = _STEPS[name](settings)
    vocabulary = document["model"]
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in vocabulary["merges"]]
    tokenizer = Tokenizer(BPE(vocabulary["vocab"], merges, **steps.model))
    if steps.normalizer is not None:
        tokenizer.normalizer = steps.normalizer
    tokenizer.pre_tokenizer = steps.pre_tokenizer
    tokenizer.decoder = steps.decoder
    # GPT-NeoX's class puts nothing around a text, CodeLlama's always a BOS once it has an id.
    if name not in ("GPTNeoXTokenizer", "CodeLlamaTokenizer") and read.post_processor is not None:
        tokenizer.post_processor = read.post_processor
    return tokenizer


def finish(
    name: RebuiltClass, tokenizer: Tokenizer, settings: Settings, special: Iterable[str]
) -> None:
    """Do what the class does when all tokens are added. special: texts of the special ones."""
    bos = settings.get("bos_token")
    if name == "CodeLlamaTokenizer" and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if name == "Qwen2Tokenizer":
        tokenizer.add_tokens([AddedToken(text, special=True) for text in special])


def put_around(tokenizer: Tokenizer, settings: Settings) -> None:
    """Put tokens around every text as the settings say, where no file has a post-processor."""
    bos, eos = (
        settings.get(f"{kind}_token") if settings.get(f"add_{kind}_token") else None
        for kind in ("bos", "eos")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text],
    )


def _spaced(settings: Settings) -> bool:
    """Whether a space is put before a text: it is unless a setting says otherwise."""
    return settings.get("add_prefix_space") is not False


def _pieces(*, strips: bool) -> decoders.Decoder:
    """The decoder of SentencePiece's pieces."""
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    steps.append(decoders.Fuse())
    if strips:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _metaspace(scheme: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)


def _llama(settings: Settings) -> _Steps:
    spaced = _spaced(settings)
    scheme = ("always" if settings.get("legacy") else "first") if spaced else "never"
    model = {"fuse_unk": True, "byte_fallback": True}
    return _Steps(model, None, _metaspace(scheme), _pieces(strips=spaced))


def _code_llama(settings: Settings) -> _Steps:
    model = {"fuse_unk": True, "byte_fallback": True, "unk_token": settings.get("unk_token")}
    scheme = "first" if _spaced(settings) else "never"
    return _Steps(model, None, _metaspace(scheme), _pieces(strips=True))


def _gemma(settings: Settings) -> _Steps:
    model = {"fuse_unk": True, "byte_fallback": True, "unk_token": settings.get("unk_token")}
    spaces = normalizers.Replace(" ", "▁")
    return _Steps(
        model, spaces, pre_tokenizers.Split(" ", "merged_with_previous"), _pieces(strips=False)
    )


def _qwen(pattern: str) -> Callable[[Settings], _Steps]:
    def steps(settings: Settings) -> _Steps:
        cuts = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False
            ),
        ]
        return _byte_level(normalizers.NFC(), pre_tokenizers.Sequence(cuts))

    return steps


def _gpt_2(settings: Settings) -> _Steps:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    return _byte_level(None, cut)


def _gpt_neox(settings: Settings) -> _Steps:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    return _byte_level(normalizers.NFC(), cut)


def _cohere(settings: Settings) -> _Steps:
    cuts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space"))),
    ]
    return _byte_level(normalizers.NFC(), pre_tokenizers.Sequence(cuts))


def _byte_level(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> _Steps:
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return _Steps(model, normalizer, pre_tokenizer, decoders.ByteLevel())


_STEPS: dict[RebuiltClass, Callable[[Settings], _Steps]] = {
    "CodeLlamaTokenizer": _code_llama,
    "CohereTokenizer": _cohere,
    "GPT2Tokenizer": _gpt_2,
    "GPTNeoXTokenizer": _gpt_neox,
    "GemmaTokenizer": _gemma,
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen(_QWEN_2),
    "Qwen3_5Tokenizer": _qwen(_QWEN_3_5),
}
