"""Token events to text events: cutting, stopping, finishing, resuming."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.generation import GenerationCall, TextEvent
from router.text.stream import ChoiceStream, prompt_tokens
from server.protocol import Finish, SamplingParams, TokenEvent, TokenLogprob
from tests.router.text.small_models import text_model
from tests.router.text.test_stops import naive

MODEL = text_model("byte_level")
EOS = next(iter(MODEL.eos_token_ids))


def call(stop: tuple[str, ...] = (), include_stop: bool = False, **sampling: Any) -> GenerationCall:
    return GenerationCall(
        api="chat",
        prompts=("x",),
        messages=None,
        adapter=None,
        sampling=SamplingParams(**sampling),
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
    stream = ChoiceStream(
        call(tuple(stops), include, logprobs=1 if logprobs else None), MODEL, 2, 3
    )
    out = run(stream, events(ids, cuts, "length", logprobs=logprobs))
    text, hit = naive(MODEL.decode(ids), stops, include)
    assert "".join(part.text for part in out) == text
    assert stream.finish == ("stop" if hit is not None else "length")
    assert [part.finish is not None for part in out] == [False] * (len(out) - 1) + [True]
    result = stream.result()
    assert (result.text, result.prompt_index, result.choice) == (text, 2, 3)
    assert sum(part.num_tokens for part in out) == result.generated_tokens
    assert result.tokens == tuple(token for part in out for token in part.tokens)
    if logprobs and (hit is not None or "�" not in text):
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
    stream = ChoiceStream(call(stop_token_ids=stop_ids, logprobs=0), MODEL)
    out = stream.feed(event(0, [290, last], finish, logprobs=True))
    assert out is not None
    assert out.finish == stream.finish == expected
    assert not stream.must_abort
    assert stream.result().generated_tokens == len(stream.result().tokens) == 2
    if finish == "stop":
        assert stream.result().text == MODEL.decode([290])


def test_a_stop_string_aborts_the_rest() -> None:
    ids = MODEL.encode("the order. and more of it", add_special_tokens=False)
    stream = ChoiceStream(call((". ",)), MODEL)
    assert "".join(e.text for e in run(stream, [event(i, [t]) for i, t in enumerate(ids)])) == (
        "the order"
    )
    assert stream.must_abort
    assert stream.finish == "stop"
    assert stream.feed(event(len(ids), [300], "abort")) is None


def test_kept_stop_strings_come_out_token_by_token() -> None:
    ids = MODEL.encode("the order", add_special_tokens=False)
    stream = ChoiceStream(call(("orders",), True, logprobs=0), MODEL)
    for i, token_id in enumerate(ids):
        out = stream.feed(event(i, [token_id], logprobs=True))
        assert out is not None
        assert [token.token_id for token in out.tokens] == [token_id]
        assert out.text == out.tokens[0].text


def test_tokens_carry_logprobs_and_bytes() -> None:
    ids = MODEL.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    stream = ChoiceStream(call(logprobs=2), MODEL)
    stream.feed(event(0, ids, "length", logprobs=True))
    tokens = stream.result().tokens
    assert [token.text for token in tokens] == [""] * (len(ids) - 1) + ["🙂"]
    assert b"".join(token.raw or b"" for token in tokens) == "🙂".encode()
    assert tokens[0].top[1] == (0, "<s>", -1.0)
    assert stream.result().sum_logprob == pytest.approx(-0.5 * len(ids))


def test_without_logprobs_no_tokens_are_told() -> None:
    stream = ChoiceStream(call(), MODEL)
    out = stream.feed(event(0, [300, 301], "length"))
    assert out is not None
    assert (out.tokens, out.num_tokens) == ((), 2)
    assert stream.result().sum_logprob is None


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    ids = MODEL.encode("🙂", add_special_tokens=False)[:-1]
    stream = ChoiceStream(call(logprobs=0), MODEL)
    stream.feed(event(0, ids, "length", logprobs=True))
    assert stream.result().text == "�"
    assert "".join(token.text for token in stream.result().tokens) == "�"


def test_a_prompt_that_ends_inside_a_character() -> None:
    """Where its tokens stand in the text is reckoned by theirs."""
    ids = MODEL.encode("ab🙂", add_special_tokens=False)[:-1]
    decoded = MODEL.decode(ids)
    text = "".join(token.text for token in prompt_tokens(MODEL, decoded, ids, None))
    assert text == decoded == "ab�"


def test_prompt_tokens() -> None:
    ids = MODEL.encode("the 🙂", add_special_tokens=True)
    logprobs = [TokenLogprob(i, None if n == 0 else -1.0) for n, i in enumerate(ids)]
    tokens = prompt_tokens(MODEL, "the 🙂", ids, logprobs)
    assert "".join(token.text for token in tokens) == "the 🙂"
    assert (tokens[0].token, tokens[0].logprob, tokens[1].logprob) == ("<s>", None, -1.0)


@pytest.mark.parametrize("text", ["a</s>b<s>c", "<s>a", "</s></s>", "a</s", "the 🙂</s>"])
def test_prompts_that_spell_special_tokens_out(text: str) -> None:
    ids = MODEL.encode(text, add_special_tokens=True)
    tokens = prompt_tokens(MODEL, text, ids, None)
    assert "".join(token.text for token in tokens) == text


def test_a_tokenizer_that_puts_a_space_before_the_text() -> None:
    ids = MODEL.encode(" the cat", add_special_tokens=False)
    tokens = prompt_tokens(MODEL, "the cat", ids, None)
    assert "".join(token.text for token in tokens) == "the cat"
