"""Token events to text events: cutting, stopping, finishing, resuming."""

import os.path
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer

from loraplex.router.call import GenerationCall, TextEvent
from loraplex.router.parts.division import DividedAnswer, Division
from loraplex.router.parts.parts import ToolCall
from loraplex.router.text.stops import StopMatcher
from loraplex.router.text.stream import ChoiceStream, prompt_tokens
from loraplex.server.protocol import Finish, SamplingParams, TokenEvent, TokenLogprob
from tests.router.parts.readers import BracketReader, ThinkReader, numbered
from tests.router.text.small_models import KINDS, ids_of, text_model
from tests.router.text.test_stops import naive

MODEL = text_model("byte_level")
EOS = MODEL.card.eos_token_ids[0]


def call(stop: tuple[str, ...] = (), include_stop: bool = False, **sampling: Any) -> GenerationCall:
    return GenerationCall(
        api="chat",
        prompts=("x",),
        messages=None,
        adapter=None,
        sampling=SamplingParams(end_token_ids=(EOS,), **sampling),
        max_tokens=None,
        n=1,
        best_of=1,
        stop=stop,
        include_stop=include_stop,
        echo=False,
        stream=True,
        seed=None,
    )


def event(
    index: int, ids: list[int], finish: Finish | None = None, *, logprobs: bool = False
) -> TokenEvent:
    values = tuple(TokenLogprob(i, -0.5, ((i, -0.5), (0, -1.0))) for i in ids)
    return TokenEvent("r", 0, 0, index, tuple(ids), finish, values if logprobs else None)


def events(
    ids: list[int], cuts: list[int], finish: Finish | None, *, logprobs: bool
) -> list[TokenEvent]:
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    parts = [
        event(a, ids[a:b], logprobs=logprobs) for a, b in zip(borders, borders[1:], strict=False)
    ]
    return [*parts, event(len(ids), [], finish, logprobs=logprobs)]


def run(stream: ChoiceStream, parts: list[TokenEvent]) -> list[TextEvent]:
    return [out for part in parts if (out := stream.feed(part)) is not None]


def stops_of(call: GenerationCall) -> StopMatcher:
    return StopMatcher(call.stop, call.include_stop, call.stop_regex)


def stream_of(
    call: GenerationCall,
    kind: str = "byte_level",
    prompt: Sequence[int] = (),
    prompt_index: int = 0,
    choice: int = 0,
) -> ChoiceStream:
    model = text_model(kind)
    detokenizer = model.detokenizer(prompt, call)
    return ChoiceStream(call, model, detokenizer, stops_of(call), prompt_index, choice)


IDS = st.lists(
    st.sampled_from([i for i in range(MODEL.card.vocab_size) if not MODEL.is_special(i)]),
    max_size=25,
)
CUTS = st.lists(st.integers(0, 25), max_size=10)


@settings(max_examples=200)
@given(
    IDS,
    CUTS,
    st.lists(st.text("the r", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_of_the_events_gives_the_same_text(
    ids: list[int], cuts: list[int], stops: list[str], include: bool, logprobs: bool
) -> None:
    stream = stream_of(
        call(tuple(stops), include, logprobs=1 if logprobs else None), prompt_index=2, choice=3
    )
    out = run(stream, events(ids, cuts, "length", logprobs=logprobs))
    text, hit = naive(MODEL.decode(ids), stops, include)
    assert "".join(part.text for part in out) == text
    assert stream.finish == ("stop" if hit is not None else "length")
    assert [part.finish is not None for part in out] == [False] * (len(out) - 1) + [True]
    result = stream.result()
    assert (result.matched, out[-1].matched) == (hit, hit)
    assert (result.text, result.prompt_index, result.choice) == (text, 2, 3)
    assert sum(part.num_tokens for part in out) == result.generated_tokens
    assert sum((part.token_ids for part in out), ()) == result.token_ids
    assert result.token_ids == tuple(ids[: result.generated_tokens])
    assert result.tokens == tuple(token for part in out for token in part.tokens)
    if logprobs:
        assert "".join(token.text for token in result.tokens) == text


@pytest.mark.parametrize(
    ("finish", "last", "stop_ids", "expected"),
    [
        ("stop", EOS, (), "eos"),
        ("stop", 300, (300,), "stop"),
        ("stop", EOS, (EOS,), "stop"),
        ("length", 300, (), "length"),
        ("abort", 300, (), "abort"),
        ("error", 300, (), "error"),
    ],
)
def test_finish(finish: Finish, last: int, stop_ids: tuple[int, ...], expected: str) -> None:
    stream = stream_of(call(stop_token_ids=stop_ids, logprobs=0))
    out = stream.feed(event(0, [290, last], finish, logprobs=True))
    assert out is not None
    assert out.finish == stream.finish == expected
    assert not stream.must_abort
    assert stream.result().generated_tokens == len(stream.result().tokens) == 2
    if finish == "stop":
        assert stream.result().text == MODEL.decode([290])


def test_a_stop_string_aborts_the_rest() -> None:
    ids = MODEL.encode("the order. and more of it", add_special_tokens=False)
    stream = stream_of(call((". ",)))
    assert "".join(e.text for e in run(stream, [event(i, [t]) for i, t in enumerate(ids)])) == (
        "the order"
    )
    assert stream.must_abort
    assert stream.finish == "stop"
    assert stream.feed(event(len(ids), [300], "abort")) is None


def test_kept_stop_strings_come_out_token_by_token() -> None:
    ids = MODEL.encode("the order", add_special_tokens=False)
    stream = stream_of(call(("orders",), True, logprobs=0))
    for i, token_id in enumerate(ids):
        out = stream.feed(event(i, [token_id], logprobs=True))
        assert out is not None
        assert [token.token_id for token in out.tokens] == [token_id]
        assert out.text == out.tokens[0].text


def test_tokens_carry_logprobs_and_bytes() -> None:
    ids = MODEL.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    stream = stream_of(call(logprobs=2))
    stream.feed(event(0, ids, "length", logprobs=True))
    tokens = stream.result().tokens
    assert [token.text for token in tokens] == [""] * (len(ids) - 1) + ["🙂"]
    assert b"".join(token.raw or b"" for token in tokens) == "🙂".encode()
    assert tokens[0].top[1] == (0, "<s>", -1.0, True)
    assert stream.result().sum_logprob == pytest.approx(-0.5 * len(ids))


def test_without_logprobs_no_tokens_are_reported() -> None:
    stream = stream_of(call())
    out = stream.feed(event(0, [300, 301], "length"))
    assert out is not None
    assert (out.tokens, out.num_tokens) == ((), 2)
    assert stream.result().sum_logprob is None


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    ids = MODEL.encode("🙂", add_special_tokens=False)[:-1]
    stream = stream_of(call(logprobs=0))
    stream.feed(event(0, ids, "length", logprobs=True))
    assert stream.result().text == "�"
    assert "".join(token.text for token in stream.result().tokens) == "�"


def test_prompt_tokens() -> None:
    ids, parts = MODEL.encode_parts("the 🙂", add_special_tokens=True)
    logprobs = [TokenLogprob(i, None if n == 0 else -1.0) for n, i in enumerate(ids)]
    tokens = prompt_tokens(MODEL, parts, ids, logprobs)
    assert "".join(token.text for token in tokens) == "the 🙂"
    assert (tokens[0].token, tokens[0].logprob, tokens[1].logprob) == ("<s>", None, -1.0)


def answer_by_definition(kind: str, prompt: list[int], ids: list[int], skip_special: bool) -> str:
    library = Tokenizer.from_str(text_model(kind).card.tokenizer_json)
    before = library.decode(prompt, skip_special_tokens=skip_special)
    whole = library.decode(prompt + ids, skip_special_tokens=skip_special)
    return whole[len(os.path.commonprefix([before, whole])) :]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(data=st.data(), cuts=CUTS, skip_special=st.booleans(), logprobs=st.booleans())
def test_the_text_of_an_answer_by_its_definition(
    kind: str, data: st.DataObject, cuts: list[int], skip_special: bool, logprobs: bool
) -> None:
    """Every kind of tokenizer, any ids, after any prompt; the parts of its tokens are all of it."""
    model = text_model(kind)
    some_ids = st.lists(st.integers(0, model.card.vocab_size - 1), max_size=25)
    prompt, ids = data.draw(some_ids), data.draw(some_ids)
    asked = replace(call(logprobs=0 if logprobs else None), skip_special_tokens=skip_special)
    stream = stream_of(asked, kind, prompt)
    out = run(stream, events(ids, cuts, "length", logprobs=logprobs))
    text = answer_by_definition(kind, prompt, ids, skip_special)
    assert "".join(part.text for part in out) == stream.result().text == text
    if logprobs:
        tokens = stream.result().tokens
        assert [token.token_id for token in tokens] == ids
        assert "".join(token.text for token in tokens) == text


def tokens_of(kind: str, *tokens: str) -> list[int]:
    ids = ids_of(Tokenizer.from_str(text_model(kind).card.tokenizer_json), *tokens)
    assert len(ids) == len(tokens)
    return ids


# Of a prompt and an answer: the answer's text, token by token.
PARTS: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "a word goes on": ("merged", ["▁th"], ["e"], ["e"]),
    "a word begins": ("merged", ["▁the"], ["▁the"], [" the"]),
    "nothing before": ("merged", [], ["▁the", "▁the"], ["the", " the"]),
    "a special token before": ("merged", ["<s>"], ["▁the", "▁a"], ["the", " a"]),
    "a character goes on": (*("byte_fallback", ["t", "<0xC3>"], ["<0xBC>", "t"], ["ü", "t"]),),
    "a run of bytes": (
        *("byte_fallback", ["t"], ["<0x0A>", "<0xC3>", "<0xBC>", "<0x0A>", "t"]),
        ["\n", "", "ü", "\n", "t"],
    ),
    "a run at the end": ("byte_fallback", ["t"], ["t", "<0x0A>", "<0x0A>"], ["t", "\n", "\n"]),
    "no text": ("byte_fallback", ["t"], ["<0xC3>", "<0x0A>", "t"], ["�", "�", "t"]),
    "the prompt's bytes are no text": (
        *("byte_fallback", ["<0x0A>"], ["<0xC3>", "t"], ["�", "�t"]),
    ),
    "bytes of a level": ("byte_level", ["a"], ["Ã", "¼", "Ã", "a"], ["", "ü", "�", "a"]),
    "the end of a word": ("bpe", ["the</w>"], ["the</w>", "the</w>"], [" the ", "the"]),
    "within a special token": ("byte_fallback", ["t"], ["<0x0A>", "</s>", "t"], ["\n", "", "t"]),
}


@pytest.mark.parametrize(("kind", "prompt", "answer", "parts"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("streamed", [True, False])
def test_each_token_s_part(
    kind: str, prompt: list[str], answer: list[str], parts: list[str], streamed: bool
) -> None:
    stream = stream_of(call(logprobs=0), kind, tokens_of(kind, *prompt))
    ids = tokens_of(kind, *answer)
    run(stream, events(ids, list(range(25)) if streamed else [], "length", logprobs=True))
    assert [token.text for token in stream.result().tokens] == parts


ENDS = {
    # written: where the answer's own end, and a token of the caller's, are part of its text.
    "OpenAI": (False, True, "", ""),
    "OpenAI, with special tokens": (False, False, "", ""),
    "vLLM's include_stop_str_in_output": (True, True, "", "the"),
    "the same, with special tokens": (True, False, "</s>", "the"),
}


@pytest.mark.parametrize(("include", "skip", "own", "asked"), ENDS.values(), ids=ENDS)
def test_the_token_that_ended_the_answer(include: bool, skip: bool, own: str, asked: str) -> None:
    for token, ending in (("</s>", own), ("the", asked)):
        (a, last) = tokens_of("byte_level", "a", token)
        asks = call((), include, logprobs=0, stop_token_ids=(last,) if token == "the" else ())
        stream = stream_of(replace(asks, skip_special_tokens=skip))
        stream.feed(event(0, [a, last], "stop", logprobs=True))
        result = stream.result()
        assert (result.text, result.token_ids) == ("a" + ending, (a, last))
        assert (result.tokens[1].special, result.tokens[1].text) == (token == "</s>", ending)
        assert result.finish == ("stop" if token == "the" else "eos")


# Stop string; ids of the answer, its last ends it; text without and with the stop string.
SPECIAL_STOPS = {
    "a special token": ("<|user|>", ["a", "<|user|>", "b"], "a", "a"),
    "text and a special token": ("a<|user|>", ["b", "a", "<|user|>"], "b", "ba"),
    "a special token and text": ("<|user|>b", ["a", "<|user|>", "b", "c"], "a", "ab"),
    "around a special token": ("a<|user|>b", ["c", "a", "<|user|>", "b"], "c", "cab"),
    "part of a special token": ("user|", ["a", "<|user|>", "b"], "a", "a"),
    "text around what is left out": ("ab", ["c", "a", "<|user|>", "b", "c"], "c", "cab"),
    "two special tokens": ("<|user|><s>", ["a", "<|user|>", "<s>", "b"], "a", "a"),
    "the model's own end": ("a</s>", ["b", "a", "</s>"], "b", "ba"),
    "the model's own end alone": ("</s>", ["b", "a", "</s>"], "ba", "ba"),
    "bytes, a special token": ("<0x0A></s>", ["b", "<0x0A>", "</s>"], "b", "b\n"),
    "bytes that are held back": ("</s>", ["b", "<0x0A>", "<0x0A>", "</s>"], "b\n\n", "b\n\n"),
}


@pytest.mark.parametrize(
    ("stop", "answer", "without", "kept"), SPECIAL_STOPS.values(), ids=SPECIAL_STOPS
)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_stop_strings_that_name_special_tokens(
    stop: str, answer: list[str], without: str, kept: str, include: bool, streamed: bool
) -> None:
    stop = stop.replace("<0x0A>", "\n")
    ids = tokens_of("byte_fallback", *answer)
    stream = stream_of(
        call((stop,), include, logprobs=0), "byte_fallback", tokens_of("byte_fallback", "t")
    )
    ends = answer[-1] == "</s>"
    parts = [event(i, [t], logprobs=True) for i, t in enumerate(ids)]
    if ends:
        parts[-1] = event(len(ids) - 1, ids[-1:], "stop", logprobs=True)
    if not streamed:
        parts = [event(0, ids, "stop" if ends else None, logprobs=True)]
    text = "".join(out.text for out in run(stream, parts))
    assert text == stream.result().text == (kept if include else without)
    assert stream.finish == "stop"
    assert stream.must_abort is not ends
    assert "".join(token.text for token in stream.result().tokens) == text


@pytest.mark.parametrize("stop", ["<|user|>", "a<|user|>b"])
def test_written_special_tokens_are_text_like_any_other(stop: str) -> None:
    ids = tokens_of("byte_fallback", "c", "a", "<|user|>", "b", "c")
    asked = replace(call((stop,), True), skip_special_tokens=False)
    stream = stream_of(asked, "byte_fallback")
    run(stream, [event(i, [t]) for i, t in enumerate(ids)])
    assert stream.result().text == "ca<|user|>b"[: "ca<|user|>b".find(stop) + len(stop)]


def test_no_spaces_between_special_tokens() -> None:
    ids = tokens_of("words", "a", "<s>", "<|user|>", "a")
    for spaces, text in ((True, "a <s> <|user|> a"), (False, "a <s><|user|> a")):
        asked = replace(call(), skip_special_tokens=False, spaces_between_special_tokens=spaces)
        stream = stream_of(asked, "words")
        run(stream, [event(0, ids, "length")])
        assert stream.result().text == text


def test_choices_do_not_share_what_is_held_back() -> None:
    asked = call()
    model = text_model("byte_fallback")
    fed = model.detokenizer(tokens_of("byte_fallback", "t", "<0xC3>"), asked)
    texts = []
    for last in ("<0xBC>", "<0xA4>"):
        stream = ChoiceStream(asked, model, fed.copy(), stops_of(asked))
        stream.feed(event(0, tokens_of("byte_fallback", last), "length"))
        texts.append(stream.result().text)
    assert texts == ["ü", "ä"]


@settings(max_examples=50)
@given(CUTS, st.booleans())
def test_a_divided_answer_keeps_its_markers_from_the_client(
    cuts: list[int], logprobs: bool
) -> None:
    """One reader looks for a special token, which is no part of what is sent."""
    mark = next(t.content for t in MODEL.added_tokens().values() if t.special)
    ids = MODEL.encode(f"hm|the {mark}[order 1]", add_special_tokens=False)
    asked = call(logprobs=1 if logprobs else None)
    detokenizer = MODEL.detokenizer((), asked)
    markers = MODEL.special_ids((mark, "the"))
    assert markers == {mark: MODEL.special_ids((mark,))[mark]}
    detokenizer.keep(frozenset(markers.values()))
    division = Division((ThinkReader, BracketReader), frozenset((mark,)), reasons=True)
    divided = DividedAnswer(division, numbered(), frozenset(markers))
    stream = ChoiceStream(asked, MODEL, detokenizer, stops_of(asked), divided=divided)
    out = run(stream, events([*ids, EOS], cuts, "stop", logprobs=logprobs))
    result = stream.result()
    assert "".join(part.text for part in out) == result.text == "the "
    assert "".join(part.reasoning for part in out) == result.reasoning == "hm"
    written = ["".join(map(MODEL.token_text, ids[:count])) for count in range(len(ids))]
    num_reasoning = next(count for count, text in enumerate(written) if "|" in text)
    assert sum(part.num_reasoning for part in out) == result.reasoning_tokens == num_reasoning
    assert result.calls == (ToolCall("id0", "order", "1"),)
    deltas = [delta for part in out for delta in part.calls]
    assert "".join(delta.arguments for delta in deltas) == "1"
    assert [delta.id for delta in deltas if delta.name] == ["id0"]
    if logprobs:  # those of all tokens, whichever part they belong to
        assert [token.token_id for token in result.tokens] == [*ids, EOS]
