"""The base's tokenizer, as transformers' AutoTokenizer makes it of its files. No torch.

`tokenizer.json` need not know every token: others are listed, or only named, in the files beside
it. Of some classes it gives the vocabulary, the merges and the post-processor alone; the steps
between are the class's own.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
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

from loraplex.adapters.peft.files import USUAL_TOKENS, special_tokens
from loraplex.server.model.checkpoint.checkpoint import (
    CheckpointError,
    read_optional_json,
    read_text,
)
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.model.tokenizer.tokenizer_class import RebuiltClass, rebuilt_class

Settings = Mapping[str, Any]

_END = "<|endoftext|>"

_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TOKENIZER_FILE = "tokenizer.json"
# The older form of a vocabulary of bytes: GPT-2's, OPT's.
BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_MAX_TOKENIZER_BYTES = 64 << 20
_EXTRA, _EXTRA_BEFORE = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _tokens(**texts: str) -> dict[str, str]:
    return {f"{name}_token": text for name, text in texts.items()}


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


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """The tokenizer, and itself as JSON. Raises CheckpointError when it cannot be used."""
    path = folder / TOKENIZER_FILE
    try:
        text = _tokenizer_text(folder)
        if not text:
            raise CheckpointError(
                f"{folder} has no {TOKENIZER_FILE}. Where it has a tokenizer of another form, as "
                f"tokenizer.model, this command makes the file: {_making(path)}"
            )
        tokenizer, text = _make(folder, text)
        # Some are read, and then fail at any letter: no vocabulary, and no unknown token.
        tokenizer.encode("a", add_special_tokens=False)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: tokenizers {tokenizers.__version__} cannot use it ({error})"
        ) from None
    return tokenizer, text


def _making(path: Path) -> str:
    """The command by which a person makes the file at this path of the others in its folder."""
    folder, file = str(path.parent), str(path)
    code = (
        "from transformers import AutoTokenizer as T; "
        f"T.from_pretrained({folder!r}).backend_tokenizer.save({file!r})"
    )
    return f"pip install transformers sentencepiece protobuf && python -c {shlex.quote(code)}"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has the files of a tokenizer in one of its two forms."""
    return (folder / TOKENIZER_FILE).exists() or all(
        (folder / f).exists() for f in BYTE_LEVEL_FILES
    )


def _tokenizer_text(folder: Path) -> str:
    """Read tokenizer.json, or make it of the older form's files; "" = there are none."""
    if (folder / TOKENIZER_FILE).exists():
        return read_text(folder / TOKENIZER_FILE, _MAX_TOKENIZER_BYTES)
    if not has_tokenizer(folder):
        return ""
    words, merges = (read_text(folder / f, _MAX_TOKENIZER_BYTES) for f in BYTE_LEVEL_FILES)
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    document = {
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": json.loads(words), "merges": lines},
    }
    return json.dumps(document)


def special_token_settings(folder: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`, over what the tokenizer's class has without it. Where it lists
    no added tokens it is of an older form, and `special_tokens_map.json` comes before it.
    """
    return _settings(folder, _tokenizer_text(folder))


def _settings(folder: Path, text: str) -> dict[str, Any]:
    """As `special_token_settings`. text: tokenizer.json; "" = there is none."""
    settings = read_optional_json(folder / "tokenizer_config.json")
    name = _rebuilt_class(folder, settings, text)
    defaults: dict[str, Any] = {} if name is None else DEFAULT_TOKENS[name]
    listed = settings.get(_EXTRA) or settings.get(_EXTRA_BEFORE)
    if "added_tokens_decoder" not in settings:
        settings |= read_optional_json(folder / "special_tokens_map.json")
    if isinstance(listed, list):  # no other list counts
        settings |= {_EXTRA: listed, _EXTRA_BEFORE: None}
    return _padding(text) | defaults | settings


class _Padding(msgspec.Struct, frozen=True):
    pad_token: str


class _Padded(msgspec.Struct, frozen=True):
    """The part of tokenizer.json that says with what texts are padded."""

    padding: _Padding | None = None


def _padding(text: str) -> dict[str, Any]:
    """Read the padding token of tokenizer.json, which counts where nothing else names one. text:
    the file's; "" = there is none. Others say what is wrong with the file.
    """
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(text, type=_Padded).padding
        return {} if found is None else {"pad_token": found.pad_token}
    return {}


def _rebuilt_class(folder: Path, settings: Mapping[str, Any], text: str) -> RebuiltClass | None:
    """Name the class that the tokenizer is rebuilt as. None where there is no tokenizer.json, or
    none of a BPE's with merges. text: tokenizer.json, or "".
    """
    config = read_optional_json(folder / CONFIG_FILE)
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = rebuilt_class(config.get("model_type"), declared, byte_level='"ByteLevel"' in text)
    return name if '"merges"' in text else None


def _make(folder: Path, text: str) -> tuple[Tokenizer, str]:
    """Make the tokenizer from its files, with added tokens. text: tokenizer.json, which is handed
    back as it is where nothing changes.
    """
    read = Tokenizer.from_str(text)
    missing = _Missing(folder, text, read.get_added_tokens_decoder())
    name = _rebuilt_class(folder, missing.settings, text)
    is_older = not (folder / TOKENIZER_FILE).exists()
    if is_older and name not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise CheckpointError(
            f"{folder} has no {TOKENIZER_FILE}, which {name or 'its class'} needs"
        )
    if name is None:
        added = list(missing.tokens(read))
        read.add_tokens(added)
        return read, read.to_str() if added else text
    settings = missing.settings | missing.named
    tokenizer = rebuilt(name, json.loads(text), settings, read)
    tokenizer.add_tokens(list(missing.tokens(tokenizer)))
    finish(name, tokenizer, settings, missing.special)
    if is_older:
        put_around(tokenizer, settings)
    return tokenizer, tokenizer.to_str()


class _Missing:
    """Tokens of the files beside a folder's tokenizer.json, which is `text`. in_file: those that it
    lists, by id."""

    def __init__(self, folder: Path, text: str, in_file: Mapping[int, AddedToken]) -> None:
        self._folder = folder
        self._in_file = in_file
        self.settings = _settings(folder, text)
        try:
            self.named = special_tokens(self.settings)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._named_texts = {text for text in self.named.values() if text}

    @property
    def special(self) -> list[str]:
        """Texts of the special tokens that the settings name."""
        return [token.content for token in self._only_named()]

    def tokens(self, tokenizer: Tokenizer) -> Iterator[AddedToken]:
        """Tokens that the tokenizer does not have, or has otherwise, in the order of their ids.

        Tokens that are only named follow.
        """
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        seen = set(known)
        for token in self._listed():
            if repr(known.get(token.content)) != repr(token):
                token.special = token.special or token.content in self._named_texts
                seen.add(token.content)
                yield token
        for token in self._only_named():
            if token.content not in seen:
                seen.add(token.content)
                yield token

    def _listed(self) -> list[AddedToken]:
        listed = self.settings.get("added_tokens_decoder")
        if isinstance(listed, dict):
            by_id = {key: _token(value, special=False) for key, value in listed.items()}
        elif "added_tokens_decoder" in self.settings:
            raise CheckpointError(f"{self._folder}: added_tokens_decoder is no object")
        else:
            of_file = read_optional_json(self._folder / "added_tokens.json")
            by_id = {at: self._plain(text) for text, at in of_file.items()} | dict(self._in_file)
        try:
            return [by_id[at] for at in sorted(by_id, key=int)]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder}: ids of added tokens: {error}") from None

    def _plain(self, text: str) -> AddedToken:
        special = text in self._named_texts
        return AddedToken(text, normalized=not special, special=special)

    def _only_named(self) -> Iterator[AddedToken]:
        extra = self.settings.get(_EXTRA)
        values = self.settings | (extra if isinstance(extra, dict) else {})
        for name in (*USUAL_TOKENS, *(name for name in self.named if name not in USUAL_TOKENS)):
            if values.get(name):
                yield _token(values[name], special=True)
        for listed in (self.settings.get(_EXTRA_BEFORE), extra):
            for value in listed if isinstance(listed, list) else ():
                yield _token(value, special=True)


def _token(value: str | Mapping[str, Any], *, special: bool) -> AddedToken:
    """Make an added token. value: a text, or an object with `content`. Raises CheckpointError for
    anything else.
    """
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise CheckpointError(f"an added token is neither text nor has content: {str(value)[:100]}")
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(value["content"], **({"special": special} | flags))
