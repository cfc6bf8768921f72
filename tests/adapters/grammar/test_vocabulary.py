"""Bytes of tokens, against what the router's decoder makes of them and the library's decode."""

import json

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from loraplex.adapters.grammar.vocabulary import (
    UnknownBytes,
    VocabularyError,
    make_vocabulary,
    token_bytes,
)
from loraplex.router.text.text_decoder import make_decoder
from tests.grids import beyond
from tests.vocabularies import BY_FORM, FORMS, byte_vocabulary, load

TEXTS = ["{“a”: [1, 2,\n\t3.5e-7]}", "über 漢字 🙂 naïve\r\n  x", '"\\u00e9\\n" <0x41> ▁ Ġ']


@pytest.mark.parametrize("name", beyond(len(FORMS), BY_FORM))
def test_bytes_of_tokens_join_to_the_text_that_follows_a_prompt(name: str) -> None:
    text = load(name)
    tokenizer = Tokenizer.from_str(text)
    known = token_bytes(text, tokenizer.get_vocab_size())
    for sample in TEXTS:
        ids = tokenizer.encode(f"a {sample}", add_special_tokens=False).ids
        ids = [i for i in ids if i not in known.specials]
        decoder = make_decoder(json.loads(text)["decoder"])
        tokens = [tokenizer.id_to_token(i) or "" for i in ids]
        begin = decoder.push(tokens[0]) + decoder.copy().flush()
        rest = "".join(decoder.push(token) for token in tokens[1:]) + decoder.flush()
        joined = b"".join(known.by_id[i] for i in ids[1:])
        assert rest.removeprefix(begin) == joined.decode(), begin


@pytest.mark.parametrize("name", beyond(1, ["llama-2", "tekken", "llama-3"]))
def test_every_byte_has_a_token(name: str) -> None:
    known = token_bytes(load(name), 131_072)
    assert {bytes((b,)) for b in range(256)} - {b for b in known.by_id if len(b) == 1} <= {
        bytes((b,)) for b in range(0xC0, 0x100)
    }


def test_ids_beyond_the_tokenizer_have_no_bytes_and_fill_the_mask() -> None:
    vocabulary = make_vocabulary(load("llama-2"), 32_100, [2])
    matcher = LLMatcher(vocabulary.tokenizer, "start: /(.|\\n)*/", log_level=0)
    mask = matcher.compute_bitmask()
    assert len(mask) == -(-32_100 // 32) * 4
    allowed = [i for i in range(32_100) if mask[i // 8] >> i % 8 & 1]
    assert max(allowed) < 32_000
    assert 2 in allowed  # it may end


@pytest.mark.parametrize("token_id", [1, 7, 32_050])
def test_grammars_name_tokens_by_their_ids(token_id: int) -> None:
    vocabulary = make_vocabulary(load("llama-2"), 32_100, [2])
    matcher = LLMatcher(vocabulary.tokenizer, f'start: <[{token_id}]> "a"', log_level=0)
    mask = matcher.compute_bitmask()
    assert [i for i in range(32_100) if mask[i // 8] >> i % 8 & 1] == [token_id]
    assert matcher.consume_token(token_id)


def test_special_tokens_are_never_text() -> None:
    vocabulary = make_vocabulary(load("llama-2"), 32_000, [2])
    text = vocabulary.tokens.specials[1].decode()
    matcher = LLMatcher(vocabulary.tokenizer, f'start: "{text}"', log_level=0)
    mask = matcher.compute_bitmask()
    assert not mask[0] >> 1 & 1


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        ({"type": "CTC"}, "CTC"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}, "Replace"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "start": 0, "stop": 1}],
            },
            "whole texts",
        ),
    ],
)
def test_a_decoder_that_looks_at_other_tokens_is_refused(decoder: object, said: str) -> None:
    document = {"model": {"vocab": {"a": 0}}, "decoder": decoder}
    with pytest.raises(UnknownBytes, match=said):
        token_bytes(json.dumps(document), 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": [1]}}', '{"model": 3}'])
def test_a_broken_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(VocabularyError, match="cannot be read"):
        make_vocabulary(text, 10, [1])


def test_without_a_decoder_tokens_are_joined_by_spaces() -> None:
    document = {"model": {"vocab": [["a", 0.0], ["b", 0.0]]}, "decoder": None}
    assert token_bytes(json.dumps(document), 3).by_id == [b" a", b" b", b""]


def test_no_end_token_is_refused() -> None:
    with pytest.raises(VocabularyError, match="end token"):
        make_vocabulary(load("llama-2"), 32_000, [])


def test_single_bytes_follow_the_special_tokens() -> None:
    vocabulary = byte_vocabulary(10, (3,), {3: b"</s>"})
    matcher = LLMatcher(vocabulary.tokenizer, 'start: <[3]> "a"', log_level=0)
    assert matcher.consume_tokens([3, 10 + ord("a")])
    assert matcher.is_accepting()
