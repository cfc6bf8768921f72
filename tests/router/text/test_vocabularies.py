"""Real vocabularies: any ids and hard texts, streamed in any cuts, against the library's decode.

`make vocabularies` brings them; see tests/vocabularies.py.
"""

import os.path
import random
from functools import cache

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from loraplex.router.call import GenerationCall
from loraplex.router.text.model import TextModel
from loraplex.router.text.stops import StopMatcher
from loraplex.router.text.stream import ChoiceStream
from loraplex.server.protocol import ModelCard, SamplingParams, TokenEvent, TokenLogprob
from tests.grids import beyond
from tests.router.text.test_stops import Item, naive_views
from tests.vocabularies import BY_FORM, FORMS, load

FRAGMENTS = (
    *("Hello", "hello world", " the", "The quick brown fox", "don't", "I'm", "x", "ab", "1234567"),
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\r\n",
        "\n\n",
        "\t",
        "\r",
        " \n ",
        "\x00",
        "\u00a0",
        "\u200b",
        "\ufeff",
    ),
    *(
        "🙂",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "👍🏽",
        "❤️",
        "🙂🙂",
        "日本語",
        "你好,世界。",
        "한국어",
        "ไทย",
        "हिन्दी",
    ),
    *("e\u0301", "n\u0303o", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙", "ﬁ", "Ǆ", "العربية", "עברית", "Привет", "ü", "ß", "€"),
    *("▁", "▁▁a", "Ġ", "##a", "<0x41>", "<0xE4>", "�", "</w>", "<unk>", "{special}", " {special} "),
    *("def f(x):\n    return [x] * 2\n", '{"a": [1, 2.5e-3]}', "https://a.b/c?d=e#f", "C++", "\\n"),
)
NAMES = beyond(len(FORMS), BY_FORM)


class Vocabulary:
    """A model of that tokenizer, and what the library says of it."""

    def __init__(self, name: str) -> None:
        source = load(name)
        self.library = Tokenizer.from_str(source)
        self.model = TextModel(
            ModelCard(
                base_digest="b" * 64,
                names=(name,),
                tokenizer_json=source,
                chat_template=None,
                special_tokens={},
                eos_token_ids=(),
                vocab_size=self.library.get_vocab_size(),
                max_context=4096,
                dtype="float32",
                device="cpu",
                max_lora_rank=64,
            )
        )
        added = self.library.get_added_tokens_decoder()
        self.specials = {i: token.content for i, token in added.items() if token.special}
        some = range(0, self.model.card.vocab_size, 1 + self.model.card.vocab_size // 40_000)
        parts = [i for i in some if "�" in self.model.token_text(i)]
        self.parts = parts or list(self.specials)

    def any_ids(self, rng: random.Random, most: int) -> list[int]:
        """Ids of all kinds; parts of characters and special tokens are as frequent as others."""
        kinds = (range(self.model.card.vocab_size), self.parts, list(self.specials))
        return [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(0, most))]

    def hard_text(self, rng: random.Random, most: int) -> str:
        special = rng.choice(list(self.specials.values()))
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, most)))
        return text.replace("{special}", special)

    def answer(self, prompt: list[int], ids: list[int], skip_special: bool = True) -> str:
        """By its definition, from the library."""
        before = self.library.decode(prompt, skip_special_tokens=skip_special)
        whole = self.library.decode(prompt + ids, skip_special_tokens=skip_special)
        return whole[len(os.path.commonprefix([before, whole])) :]

    def stream(self, call: GenerationCall, prompt: list[int]) -> ChoiceStream:
        detokenizer = self.model.detokenizer(prompt, call)
        return ChoiceStream(
            call, self.model, detokenizer, StopMatcher(call.stop, call.include_stop)
        )


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(name)


def call_of(*stops: str, include: bool = False, logprobs: bool = False) -> GenerationCall:
    sampling = SamplingParams(logprobs=0 if logprobs else None)
    return GenerationCall(
        api="chat",
        prompts=("x",),
        messages=None,
        adapter=None,
        sampling=sampling,
        max_tokens=None,
        stop=stops,
        include_stop=include,
    )


def run(stream: ChoiceStream, ids: list[int], borders: list[int]) -> str:
    """The text of a stream whose events end at the borders."""
    cuts = [0, *sorted(borders), len(ids)]
    text = ""
    for begin, end in zip(cuts, cuts[1:], strict=False):
        logprobs = tuple(TokenLogprob(i, -1.0) for i in ids[begin:end])
        event = TokenEvent("r", 0, 0, begin, tuple(ids[begin:end]), None, logprobs)
        out = stream.feed(event)
        text += out.text if out is not None else ""
    out = stream.feed(TokenEvent("r", 0, 0, len(ids), (), "length"))
    return text + (out.text if out is not None else "")


def check_stream(known: Vocabulary, rng: random.Random, prompt: list[int], ids: list[int]) -> None:
    skip_special = rng.random() < 0.5
    asked = replace(call_of(logprobs=rng.random() < 0.5), skip_special_tokens=skip_special)
    stream = known.stream(asked, prompt)
    borders = [rng.randint(0, len(ids)) for _ in range(rng.randint(0, len(ids)))]
    text = run(stream, ids, borders)
    expected = known.answer(prompt, ids, skip_special)
    assert text == stream.result().text == expected
    if asked.sampling.logprobs is not None:
        assert "".join(token.text for token in stream.result().tokens) == expected
    assert known.model.decode(ids, skip_special) == known.library.decode(
        ids, skip_special_tokens=skip_special
    )


def check_any_ids(name: str, seed: int, count: int) -> None:
    known, rng = vocabulary(name), random.Random(f"{name} {seed}")
    for _ in range(count):
        check_stream(known, rng, known.any_ids(rng, 12), known.any_ids(rng, 30))


def check_hard_texts(name: str, seed: int, count: int) -> None:
    known, rng = vocabulary(name), random.Random(f"{name} {seed}")
    for _ in range(count):
        text = known.hard_text(rng, most=12)
        ids, parts = known.model.encode_parts(text, add_special_tokens=True)
        assert ids == known.model.encode(text, add_special_tokens=True)
        assert not ids or "".join(parts) == text
        border = rng.randint(0, len(ids))
        check_stream(known, rng, ids[:border], ids[border:])


def seen_items(known: Vocabulary, prompt: list[int], ids: list[int]) -> list[Item]:
    """An answer's text with its special tokens in their places."""
    items, whole, at = [], known.answer(prompt, ids), 0
    for index, token_id in enumerate(ids):
        if token_id in known.specials:
            end = len(known.answer(prompt, ids[:index]))
            items.append(Item(whole[at:end], is_hidden=False, is_late=False))
            items.append(Item(known.specials[token_id], is_hidden=True, is_late=False))
            at = end
    return [*items, Item(whole[at:], is_hidden=False, is_late=False)]


def stop_of(rng: random.Random, items: list[Item]) -> str:
    """Some part of an answer, as the client sees it or with special tokens."""
    with_special = rng.random() < 0.5
    text = "".join(item.text for item in items if with_special or not item.is_hidden)
    start = rng.randrange(len(text))
    return text[start : start + rng.randint(1, 8)]


def check_stops(name: str, seed: int, count: int) -> None:
    """Each stop string with every border between two events, and with events of one token."""
    known, rng = vocabulary(name), random.Random(f"{name} {seed}")
    prompt = known.model.encode("Hello", add_special_tokens=True)
    checked = 0
    while checked < count:
        words = known.model.encode(known.hard_text(rng, most=4), add_special_tokens=False)
        special = rng.choice(list(known.specials))
        ids = [
            *words,
            special,
            *known.model.encode(known.hard_text(rng, most=4), add_special_tokens=False),
        ]
        items = seen_items(known, prompt, ids)
        if not any(item.text for item in items if not item.is_hidden):
            continue
        stop, include = stop_of(rng, items), rng.random() < 0.3
        expected = naive_views(items, [stop], include)
        assert expected[1] == stop
        for borders in ([], list(range(len(ids))), *([border] for border in range(len(ids)))):
            stream = known.stream(call_of(stop, include=include), prompt)
            assert run(stream, ids, borders) == expected[0]
            assert stream.finish == "stop"
        checked += 1


@pytest.mark.parametrize("name", NAMES)
def test_any_ids_in_any_cuts(name: str) -> None:
    check_any_ids(name, seed=1, count=60)


@pytest.mark.parametrize("name", NAMES)
def test_hard_texts(name: str) -> None:
    check_hard_texts(name, seed=2, count=50)


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_at_all_borders(name: str) -> None:
    check_stops(name, seed=3, count=40)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4, 7))
@pytest.mark.parametrize("name", BY_FORM)
def test_many_more(name: str, seed: int) -> None:
    check_any_ids(name, seed, count=10_000)
    check_hard_texts(name, seed, count=3_000)
    check_stops(name, seed, count=1_000)
