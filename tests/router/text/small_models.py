"""Tokenizers of several kinds, small and made here, and model cards around them."""

from collections.abc import Callable
from functools import cache

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from loraplex.router.text.model import TextModel
from loraplex.server.protocol import ModelCard

CORPUS = [
    "the order of the customer came late, and the customer is angry",
    "schöne Grüße, ein Stück Käse — 你好世界, добрый день 🙂🚀",
    "def f(x):\n    return {'a': [1, 2, 3]}\n",
] * 20
SPECIALS = ["<s>", "</s>", "<|user|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

REFUSING = "{{ raise_exception('no conversation is good enough') }}"


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def byte_fallback(*merged: tuple[str, str]) -> Tokenizer:
    """As SentencePiece models in their old form: Llama 2, Mistral."""
    vocab = {token: i for i, token in enumerate([*SPECIALS, "<unk>"])}
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,",
        "ü",
        "好",
        "▁t",
        "▁th",
        "▁the",
        "he",
        "er",
        "▁▁",
    ]
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    for pair in merged:
        vocab.setdefault("".join(pair), len(vocab))
    merges = [*merged, ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("e", "r"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5-like unigram models, without bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz.,▁"
    scores = [("<unk>", 0.0), *((letter, -5.0) for letter in letters), ("▁the", -2.0)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def merged() -> Tokenizer:
    """As `byte_fallback`; every word's beginning is a token, as in real vocabularies."""
    return byte_fallback(*(("▁", letter) for letter in "abcdefghijklmnopqrsuvwxyz"))


def gemma() -> Tokenizer:
    """No space before a text, and none taken away."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def new_form() -> Tokenizer:
    """SentencePiece models in their new form: a space before the first text alone."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT."""
    words = ["[UNK]", *SPECIALS, "the", "ord", "##er", "##s", "a", "n't", ",", ".", "'"]
    words += [f"{prefix}{letter}" for prefix in ("", "##") for letter in "bcdefghijklmnoz"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def bpe() -> Tokenizer:
    """As the first GPT: the end of a word is marked."""
    words = ["<unk>", *SPECIALS, *"theor", *(f"{letter}</w>" for letter in "ther"), "th", "the</w>"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e</w>")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def words() -> Tokenizer:
    """No decoder: spaces between tokens."""
    vocab = {word: number for number, word in enumerate(["<unk>", *SPECIALS, "the", "order", "a"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "merged": merged,
    "new_form": new_form,
    "gemma": gemma,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "bpe": bpe,
    "words": words,
}


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Of tokens as the vocabulary spells them."""
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return [token_id for token_id in ids if token_id is not None]


@cache
def text_model(kind: str, max_context: int = 512) -> TextModel:
    return TextModel(card(kind, max_context))


@cache
def card(kind: str, max_context: int = 512) -> ModelCard:
    tokenizer = KINDS[kind]() if kind in KINDS else byte_level()
    (eos,) = ids_of(tokenizer, "</s>")
    return ModelCard(
        base_digest="b" * 64,
        names=("org/small", "small"),
        tokenizer_json=tokenizer.to_str(),
        chat_template=REFUSING if kind == "refusing" else TEMPLATE,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_token_ids=(eos,),
        vocab_size=tokenizer.get_vocab_size(),
        max_context=max_context,
        dtype="float32",
        device="cpu",
        max_lora_rank=64,
    )
