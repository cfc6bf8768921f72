"""Text to ids and ids to text, for the kinds of tokenizer that models come with."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from loraplex.router.call import RequestError
from loraplex.router.text.model import TextModel
from loraplex.router.text.tokenizer_json import longest_token
from tests.router.text.small_models import KINDS, SPECIALS, card, ids_of, text_model

TEXTS = st.text(alphabet="abc the,.\n🙂好ü ", max_size=40)


# What a tokenizer puts around a text, a text, and the tokens that become of it.
FRAMES = {
    "a text": ("<s> $A", "a", "<s> a"),
    "a text that has it": ("<s> $A", "<s>a", "<s> a"),
    "twice by its caller": ("<s> $A", "<s><s>a", "<s> <s> a"),
    "another token": ("<s> $A", "<|user|><s>a", "<s> <|user|> <s> a"),
    "a space before it": ("<s> $A", " <s>a", "<s> Ġ <s> a"),
    "two tokens": ("<s> <|user|> $A", "<s><|user|>a", "<s> <|user|> a"),
    "one of two tokens": ("<s> <|user|> $A", "<s>a", "<s> <|user|> <s> a"),
    "around": ("<s> $A </s>", "<s>a</s>", "<s> a </s> </s>"),
    "after": ("$A </s>", "</s>a", "</s> a </s>"),
    "nothing": ("$A", "<s>a", "<s> a"),
    "no text": ("<s> $A", "", "<s>"),
    "itself alone": ("<s> $A", "<s>", "<s>"),
}


@pytest.mark.parametrize(("frame", "text", "expected"), FRAMES.values(), ids=FRAMES)
def test_what_a_text_begins_with_is_not_put_before_it(frame: str, text: str, expected: str) -> None:
    library = KINDS["byte_level"]()
    library.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=list(zip(SPECIALS, range(3), strict=True))
    )
    model = TextModel(replace(card("byte_level"), tokenizer_json=library.to_str()))
    ids = [library.token_to_id(token) for token in expected.split()]
    assert model.encode(text, add_special_tokens=True) == ids
    assert [span.id for span in model.spans(text, add_special_tokens=True)] == ids


def test_special_tokens_are_texts_where_the_card_says_so() -> None:
    text, library = "<s>a</s> b", KINDS["byte_level"]()
    library.encode_special_tokens = True
    model = TextModel(replace(card("byte_level"), split_special_tokens=True))
    assert model.encode(text, add_special_tokens=True) == library.encode(text).ids
    assert len(library.encode(text).ids) > len(text_model("byte_level").encode(text, True))


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ([], "b"),  # no unknown token: the library raises
        ([AddedToken("\n", normalized=True)], "ü"),  # nothing is left of the token: it panics
    ],
)
def test_a_text_that_the_library_fails_at_is_refused(added: list[AddedToken], text: str) -> None:
    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    library.normalizer = normalizers.Strip()
    library.add_tokens(added)
    model = TextModel(replace(card("words"), tokenizer_json=library.to_str()))
    for work in (model.encode, model.encode_parts, model.spans):
        with pytest.raises(RequestError, match="cannot read this text"):
            work(text, False)
    with pytest.raises(RequestError, match="cannot read this text"):
        model.encode_pair("a", text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=60)
@given(data=st.data())
def test_decode_is_the_library_s(kind: str, skip_special: bool, data: st.DataObject) -> None:
    model = text_model(kind)
    ids = data.draw(st.lists(st.integers(0, model.card.vocab_size - 1), max_size=30))
    library = Tokenizer.from_str(model.card.tokenizer_json)
    text = library.decode(ids, skip_special_tokens=skip_special)
    assert model.decode(ids, skip_special) == text
    parts = model.decode_parts(ids, skip_special)
    assert (len(parts), "".join(parts)) == (len(ids), text)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=TEXTS)
def test_text_survives(kind: str, text: str) -> None:
    model = text_model(kind)
    assert model.decode(model.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=TEXTS, add_special=st.booleans())
def test_parts_of_a_text_are_all_of_it(kind: str, text: str, add_special: bool) -> None:
    model = text_model(kind)
    ids, parts = model.encode_parts(text, add_special)
    assert ids == model.encode(text, add_special)
    assert len(parts) == len(ids)
    assert "".join(parts) == (text if ids else "")


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        ("byte_level", "🙂</s>a", ["", "", "", "🙂", "</s>", "a"]),
        ("byte_fallback", "the the", ["the", " the"]),
        ("byte_fallback", "🙂the", ["", "", "", "", "🙂", "t", "he"]),
        ("metaspace", "a the", ["", "a", " the"]),
        ("word_piece", "the  order", ["the", "  ord", "er"]),
    ],
)
def test_a_character_is_its_last_token_s(kind: str, text: str, parts: list[str]) -> None:
    assert text_model(kind).encode_parts(text, True)[1] == parts


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte_level", "Ġthe", " the"),
        ("byte_fallback", "▁the", " the"),
        ("byte_fallback", "▁", " "),
        ("byte_fallback", "<0x0A>", "\n"),
        ("byte_fallback", "<0xF0>", "�"),
        ("byte_fallback", "a", "a"),
        ("merged", "a", "a"),
        ("merged", "▁a", " a"),
        ("metaspace", "▁the", " the"),
        ("metaspace", "a", "a"),
        ("word_piece", "##er", "er"),
        ("word_piece", "the", " the"),
        ("bpe", "the</w>", "the "),
        ("words", "the", " the"),
        ("byte_level", "</s>", "</s>"),
        ("byte_fallback", "</s>", "</s>"),
    ],
)
def test_a_token_s_own_text_is_what_it_adds_inside_a_text(kind: str, token: str, text: str) -> None:
    model = text_model(kind)
    (token_id,) = ids_of(Tokenizer.from_str(model.card.tokenizer_json), token)
    assert model.token_text(token_id) == text
    if "�" not in text:
        assert model.token_bytes(token_id) == text.encode()


def test_special_tokens() -> None:
    model = text_model("byte_level")
    ids = model.encode("hello", add_special_tokens=True)
    assert ids[0] == 0
    assert model.is_special(0)
    assert model.token_bytes(0) == b"<s>"
    assert model.token_text(0) == "<s>"
    assert model.decode(ids) == "hello"
    assert model.decode(ids, skip_special_tokens=False) == "<s>hello"


def test_an_end_that_the_tokenizer_does_not_call_special_is_written() -> None:
    """Unless it ends an answer: see the stream."""
    library = KINDS["byte_level"]()
    added = json.loads(library.to_str())
    for token in added["added_tokens"]:
        token["special"] = token["content"] != "</s>"
    model = TextModel(replace(card("byte_level"), tokenizer_json=json.dumps(added)))
    (end,) = model.card.eos_token_ids
    assert not model.is_special(end)
    assert model.decode([end, end]) == "</s></s>"


def test_unknown_ids_add_nothing() -> None:
    model = text_model("byte_level")
    assert model.token_bytes(10**9) == b""
    assert model.token_bytes(-1) == b""
    assert model.token_text(10**9) == ""
    assert model.decode([10**9]) == ""
    assert not model.has_token(model.card.vocab_size)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    tokenizer = KINDS["byte_level"]()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    source = json.loads(json.dumps(tokenizer.to_str()))
    changed = card("byte_level")
    model = TextModel(
        type(changed)(
            **{f: getattr(changed, f) for f in changed.__struct_fields__}
            | {"tokenizer_json": source}
        )
    )
    text = "the customer is angry about the order"
    assert model.encode(text, True) == text_model("byte_level").encode(text, True)


@pytest.mark.parametrize("text", ["the 🙂", "e\u0301" * 9, "<s> a</s>", ""])
@pytest.mark.parametrize("kind", KINDS)
def test_spans_are_where_the_library_says(kind: str, text: str) -> None:
    model = text_model(kind)
    library = Tokenizer.from_str(model.card.tokenizer_json)
    encoding = library.encode(text, add_special_tokens=False)
    spans = [*model.spans(text, add_special_tokens=False)]
    assert [(s.id, (s.start, s.stop)) for s in spans] == [
        *zip(encoding.ids, encoding.offsets, strict=True)
    ]


def test_spans() -> None:
    model = text_model("byte_level")
    spans = [*model.spans("the 🙂", add_special_tokens=True)]
    assert (spans[0].text, spans[0].start, spans[0].stop) == ("<s>", 0, 0)
    assert all(span.text == "the 🙂"[span.start : span.stop] for span in spans[1:])
    assert (spans[-1].text, spans[-1].stop) == ("🙂", 5)


@given(text=st.text(alphabet="abc the,.\n🙂好ü", max_size=200))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_token_covers_more_than_the_bound(kind: str, text: str) -> None:
    model = text_model(kind)
    bound = longest_token(model.card.tokenizer_json)
    assert bound is not None
    assert len(text) <= bound * len(model.encode(text, add_special_tokens=False))


def test_hopeless_texts_are_refused_before_encoding() -> None:
    model = text_model("byte_level", max_context=4)
    with pytest.raises(RequestError, match="context"):
        model.check_size("the " * 10000, "inputs")
    model.check_size("the", "inputs")


def test_no_bound_where_text_may_vanish() -> None:
    tokenizer = json.loads(KINDS["byte_level"]().to_str())
    tokenizer["normalizer"] = {"type": "NFC"}
    assert longest_token(json.dumps(tokenizer)) is None
    assert longest_token(KINDS["metaspace"]().to_str()) is None


NO_BOUND: dict[str, dict[str, Any]] = {
    "unknown characters are one token": {"model": {"byte_fallback": False}},
    "text that is cut elsewhere": {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "a longer text replaced": {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}}},
    "spaces that a token takes along": {"added_tokens": {"lstrip": True}},
}


@pytest.mark.parametrize("change", NO_BOUND.values(), ids=NO_BOUND)
def test_no_bound_where_a_token_may_cover_any_text(change: dict[str, Any]) -> None:
    tokenizer = json.loads(KINDS["byte_fallback"]().to_str())
    assert longest_token(json.dumps(tokenizer)) is not None
    for name, value in change.items():
        if name == "model":
            tokenizer[name] |= value
        elif name == "added_tokens":
            tokenizer[name] = [token | value for token in tokenizer[name]]
        else:
            tokenizer[name] = value
    assert longest_token(json.dumps(tokenizer)) is None


def test_an_added_token_may_cover_the_space_before_it() -> None:
    library = KINDS["byte_fallback"]()
    library.add_tokens([AddedToken("z" * 40, normalized=True)])
    text = (" " + "z" * 40) * 3
    bound = longest_token(library.to_str())
    assert bound is not None
    assert len(text) <= bound * len(library.encode(text).ids)


def test_unreadable_cards_are_refused() -> None:
    good = card("byte_level")
    fields = {f: getattr(good, f) for f in good.__struct_fields__}
    for change in ({"tokenizer_json": "{}"}, {"tokenizer_json": "["}):
        with pytest.raises(ValueError, match="org/small"):
            TextModel(type(good)(**fields | change))
