"""Each name stands once in its object: read from the bytes of tokens, and kept to by masks."""

import json
import math
import random
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, make_vocabulary
from loraplex.router.parts.reasoning import REASONING
from loraplex.router.shape.shape import AnyJson, JsonSchema
from loraplex.router.tools.compose import Composed, Frame, compose
from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools
from loraplex.server.constraints.constraint import Constraint, Names, NameTokens
from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.constraints.wishes import ConstraintWish, MaskWish
from loraplex.server.protocol import NamesOnce, SamplingParams
from tests.grids import sparse
from tests.router.tools.native import NATIVE, Call
from tests.server.constraints.grammar_harness import constraint_of
from tests.server.constraints.serving import VOCAB, constraints, tokens, vocabulary
from tests.server.constraints.test_drafts import allowed_by, mask_of, masks_of
from tests.vocabularies import VOCABULARIES, byte_vocabulary, load

JSON = NamesOnce(("{", "["))
BYTES = byte_vocabulary(1, (0,), {0: b"</s>"})
_NAMES = st.sampled_from(["a", "ab", "", 'q"', "\\", "\\\\", ",", "é", "\n", '{"a"', "a:b"])
_SCALARS = st.sampled_from(["1", "-2.5", "null", '"x"', '"\\""', '"{[,:\\\\"', '"é"', '""'])


def _joined(parts: list[str], signs: str) -> str:
    return f"{signs[0]}{', '.join(parts)}{signs[1]}"


def _member(name: str, value: str) -> str:
    return f"{json.dumps(name, ensure_ascii=False)}:{value}"


DOCUMENTS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: _joined(parts, "[]")),
        st.lists(st.builds(_member, _NAMES, inner), max_size=4).map(
            lambda parts: _joined(parts, "{}")
        ),
    ),
    max_leaves=12,
)
OBJECTS = st.lists(st.builds(_member, _NAMES, DOCUMENTS), max_size=4).map(
    lambda parts: _joined(parts, "{}")
)


def has_twice(text: str) -> bool:
    found = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        found.append(len(pairs) > len({name for name, _ in pairs}))

    json.loads(text, object_pairs_hook=look)
    return any(found)


def cut(data: st.DataObject, text: bytes) -> list[bytes]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    ends = sorted({0, len(text), *places})
    return [text[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def comes_again(rule: NamesOnce, pieces: list[bytes]) -> bool:
    names = Names(NameTokens(pieces), rule)
    return [names.take(i) for i in range(len(pieces))].count(True) > 0


@given(OBJECTS, st.data())
def test_names_that_come_again_are_seen_wherever_tokens_are_cut(
    text: str, data: st.DataObject
) -> None:
    assert comes_again(JSON, cut(data, text.encode())) is has_twice(text)


TWICE = '{"a":1,"a":2}'
WITHIN = [
    (JSON, f"[1, {TWICE}", True),
    (JSON, f'{TWICE[:-1].replace("a", "b")}, "c":{{"b":1}}', True),
    (JSON, '{"a":{"a":[{"a":1},{"a":"a"}]}}', False),
    (NamesOnce(("<call>",)), TWICE, False),
    (NamesOnce(("<call>",)), f"{TWICE} <ca<call>\n{TWICE}", True),
    (NamesOnce(("<call>",)), '<call>{"a":1}</call>, {"a":1,"a":2}', False),
    (NamesOnce(("<call>",)), f"<call>{{}} <call>{TWICE}", True),
    (NamesOnce(("calls[",)), f'calls[{{"a":1}}, {TWICE}]', True),
    (NamesOnce(("<f", "<f=")), f"<f={TWICE}", True),
    (NamesOnce(("{", "["), "<think>", "</think>"), f"<think>{TWICE}</think>{{}}", False),
    (NamesOnce(("{", "["), "<think>", "</think>"), f"<think>{{</think>\n\n{TWICE}", True),
    (NamesOnce(("{", "["), "<think>", "</think>"), TWICE, True),
    (NamesOnce(("{", "["), "[THINK]", "[/THINK]"), f"[{TWICE}", True),
    (NamesOnce(("{", "["), "[THINK]", "[/THINK]"), f"[THINK]{TWICE}[/THINK][1]", False),
    (NamesOnce(("<call>",), "", "</think>"), f"<call>{TWICE}</think>", False),
    (NamesOnce(("<call>",), "", "</think>"), f"<call>{{</think> a <call> {TWICE}", True),
]


@pytest.mark.parametrize(("rule", "text", "is_seen"), WITHIN)
@given(data=st.data())
@settings(max_examples=20)
def test_json_within_other_text(
    rule: NamesOnce, text: str, is_seen: bool, data: st.DataObject
) -> None:
    assert comes_again(rule, cut(data, text.encode())) is is_seen


PIECES = [b'"', b"a", b"b", b'a"', b'":', b'"a":', b'b":1,"', b'","a', b'a":1,"a":', b"\\", b'"a"']
PIECES += [b'{"', b"{", b"}", b",", b'},"', b'}},"a":', b'":{"a":1,"a"', b" ", b'\\"', b'"b":"",']
PIECES += [b'\\","', b"1", b":", b"]", b"[", b'"","', b"]},", b"ab"]


@given(OBJECTS, st.data())
@settings(max_examples=200)
def test_masks_lose_just_the_tokens_with_which_a_name_comes_again(
    text: str, data: st.DataObject
) -> None:
    begun = text.encode()[: data.draw(st.integers(1, len(text.encode()) - 1))]
    # The grammar has let no name come again so far.
    once = Names(NameTokens([begun]), JSON)
    if once.take(0):
        return
    every = Names(NameTokens([*PIECES, begun]), JSON)
    every.take(len(PIECES))

    def is_repeated(token: int) -> bool:
        names = Names(NameTokens([begun, PIECES[token]]), JSON)
        return names.take(0) or names.take(1)

    mask = np.full(2, -1, np.int32)
    every.forbid(mask)
    expected = [i for i in range(len(PIECES)) if not is_repeated(i)]
    assert [i for i in allowed_by(mask) if i < len(PIECES)] == expected


def test_where_no_other_token_is_left_all_stay() -> None:
    names = Names(NameTokens([b'{"a":1,"a', b'"', b'":', b"b"]), JSON)
    names.take(0)
    mask = np.array([0b0110], np.int32)
    names.forbid(mask)
    assert allowed_by(mask) == [1, 2]
    mask = np.array([0b1110], np.int32)
    names.forbid(mask)
    assert allowed_by(mask) == [3]


# Whole answers.

_FEW = {"propertyNames": {"pattern": "^[ab]*$"}, "additionalProperties": {"enum": [1]}}
_INNER = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
WALKED: dict[str, dict[str, Any]] = {
    "any": {"type": "object"},
    "few letters": {"type": "object", **_FEW},
    "many members": {"type": "object", **_FEW, "minProperties": 6},
    "begins": {
        "type": "object",
        "properties": {"a": True, "ab": {"type": "integer"}},
        "required": ["a"],
        "patternProperties": {"^a": {"enum": [1]}},
        "propertyNames": {"pattern": "^a"},
        "minProperties": 4,
    },
    "nested": {
        "type": "object",
        "patternProperties": {"^[xy]": _INNER},
        "additionalProperties": {"type": "array", "items": _INNER, "maxItems": 3},
    },
}


# Schemas of objects whose names run out, with all of these.
_VALUE = {"enum": [1, ",", [], [","]]}
_PAIRS = [f"{one}{other}" for one in 'ab"\\{,é\n' for other in 'ab"\\{,é\n}']
RUN_OUT: dict[str, tuple[set[str], dict[str, Any]]] = {
    "short": (
        {"".join(some) for n in (1, 2, 3) for some in product("abcd", repeat=n)},
        {"propertyNames": {"pattern": "^[a-d]{1,3}$"}, "additionalProperties": _VALUE},
    ),
    "listed": (
        {"n", "n3x", *(f"n{i}" for i in range(71))},
        {
            "properties": {"n3x": _VALUE, "n4": _VALUE, "n": _VALUE},
            "required": ["n4"],
            "propertyNames": {"enum": ["n", "n3x", *(f"n{i}" for i in range(71))]},
            "additionalProperties": _VALUE,
        },
    ),
    "signs": (set(_PAIRS), {"propertyNames": {"enum": _PAIRS}, "additionalProperties": _VALUE}),
}


@cache
def composed(name: str) -> Composed:
    found = compose(JsonSchema(WALKED[name], "p"))
    assert found.names_once is not None
    return found


@cache
def known_words(name: str) -> Vocabulary:
    if name in VOCABULARIES:
        return make_vocabulary(load(name), 32_000, [2])
    return BYTES if name == "bytes" else vocabulary()


class Walker:
    """Walks through the masks of a grammar. most: tokens of an answer."""

    def __init__(self, found: Composed, words: Vocabulary, most: int) -> None:
        self._once, self._words, self._most = found.names_once, words, most
        self._matcher = compile_grammar(words, found.grammar, ServedGrammarLimits())
        self._rules = TokenRules.of(SamplingParams(), words.end_ids, len(words.tokens.by_id))
        self._tokens = NameTokens(words.tokens.by_id)

    def constraint(self, begun: bytes = b"") -> Constraint:
        """begun: text that it has taken, byte by byte."""
        watches = () if self._once is None else (Names(self._tokens, self._once),)
        end = self._words.tokenizer.eos_token
        found = Constraint(self._matcher.deep_copy(), self._rules, 0, end=end, watches=watches)
        for byte in begun:
            found.take(self._words.tokens.by_id.index(bytes((byte,))))
            assert found.state == "open", begun
        return found

    def allowed(self, constraint: Constraint) -> list[int]:
        row = np.zeros(mask_words(len(self._words.tokens.by_id)), np.int32)
        constraint.fill(row)
        assert constraint.state != "failed", constraint.problem
        return allowed_by(row)

    def texts(self, constraint: Constraint) -> set[bytes]:
        """Of the tokens that may be next."""
        return {self._words.tokens.by_id[i] for i in self.allowed(constraint)}

    def longest(self, seed: int) -> str:
        """An answer that ends where masks allow nothing else."""
        rng, out, constraint = random.Random(seed), b"", self.constraint()
        by_id = self._words.tokens.by_id
        for _ in range(self._most):
            allowed = self.allowed(constraint)
            if constraint.state == "over" or set(allowed) <= set(self._words.end_ids):
                return out.decode()
            token = rng.choice([i for i in allowed if b"}" not in by_id[i]] or allowed)
            constraint.take(token)
            out += by_id[token]
        raise AssertionError(out)

    def answer(self, seed: int) -> str | None:
        """Of any tokens that masks allow; later ones tend to close what is open."""
        rng, out, constraint = random.Random(seed), b"", self.constraint()
        by_id, ends = self._words.tokens.by_id, self._words.end_ids
        for count in range(self._most):
            allowed = self.allowed(constraint)
            if rng.random() < count / self._most:
                closing = [i for i in allowed if i in ends or by_id[i][:1] in (b'"', b"}", b"]")]
                allowed = closing or allowed
            token = rng.choice(allowed)
            if constraint.state == "over" or token in ends:
                return out.decode()
            constraint.take(token)
            out += by_id[token]
        return None


@pytest.mark.parametrize(("name", "words"), sparse([*WALKED], ["bytes", "demo"]))
def test_random_answers(name: str, words: str) -> None:
    walker = Walker(composed(name), known_words(words), 120)
    validator = jsonschema.Draft202012Validator(WALKED[name])
    ended = [answer for seed in range(40) if (answer := walker.answer(seed)) is not None]
    assert len(ended) >= 10
    for answer in ended:
        assert not has_twice(answer), answer
        validator.validate(json.loads(answer))


@pytest.mark.parametrize(("name", "words"), sparse([*RUN_OUT], ["bytes", "demo", "llama-2"]))
def test_all_names_come_once_until_none_is_left(name: str, words: str) -> None:
    names, schema = RUN_OUT[name]
    walker = Walker(
        compose(JsonSchema({"type": "object", **schema}, "p")), known_words(words), 3_000
    )
    for seed in range(3):
        answer = walker.longest(seed)
        assert not has_twice(answer), answer
        may_be_left = {"n", "n3x"}  # once another one has come
        assert names - may_be_left <= json.loads(answer).keys() <= names


def test_a_begin_is_used_up_where_only_listed_names_went_on_so() -> None:
    """Names of the schema's list come first, or never."""
    schema = {"properties": {"abc": _VALUE}, "propertyNames": {"pattern": "^([a-z]{2}|abc)$"}}
    walker = Walker(compose(JsonSchema({"type": "object", **schema}, "p")), BYTES, 0)
    assert b"c" in walker.texts(walker.constraint(b'{"ab'))
    allowed = walker.texts(walker.constraint(b'{"ab":1,"a'))
    assert b"b" not in allowed
    assert b"a" in allowed


def sampling_of(name: str) -> SamplingParams:
    found = composed(name)
    return SamplingParams(grammar=found.grammar, names_once=found.names_once)


@given(data=st.data())
@settings(max_examples=30)
def test_masks_of_drafts_are_those_without_drafts(data: st.DataObject) -> None:
    wish = ConstraintWish(1, sampling_of("few letters"), ())
    answer, masks, plain = list[int](), list[list[int]](), constraint_of(wish)
    while len(answer) < 30 and (mask := mask_of(plain)) and plain.state == "open":
        shown = [i for i in mask if i not in vocabulary().end_ids]
        if not shown:
            break
        masks.append(mask)
        answer.append(data.draw(st.sampled_from(shown)))
        plain.take(answer[-1])
    constraint, count = constraint_of(wish), 0
    while count < len(answer):
        draft = answer[count : count + data.draw(st.integers(0, 5))]
        draft += data.draw(st.lists(st.sampled_from(answer), max_size=2))
        foresight = constraint.foresee(draft, len(draft))
        found = masks_of(constraint, draft)
        possible = [token in mask for token, mask in zip(draft, found, strict=False)]
        assert foresight.allowed == [*possible, False].index(False)
        for place, mask in enumerate(found):
            assert mask == masks[count] or (place and not mask)
            token = answer[count]
            count += 1
            constraint.take(token)
            if count == len(answer) or [token] != draft[place : place + 1] or not found[place + 1]:
                break


def test_names_are_kept_to_behind_reasoning() -> None:
    frame = Frame(REASONING["think"])
    walker = Walker(compose(AnyJson("p"), frame), BYTES, 0)
    constraint = walker.constraint(b'<think>{"a":1, "a": 2}, {"b</think>\n\n{"a":{"b":1},"a')
    assert b'"' not in walker.texts(constraint)
    constraint.take(BYTES.tokens.by_id.index(b"b"))
    assert b'"' in walker.texts(constraint)


UNREAD = {"functionary_v3", "glm", "olmo3", "pythonic", "qwen3_coder"}


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_names_in_calls_of_each_format(name: str) -> None:
    form = name.split()[0]
    frame = Frame(tools=Tools((Tool("now"),)), tool_format=FORMATS[form])
    found = compose(None, frame)
    if form in UNREAD:
        assert found.names_once is None
        return
    calls: list[Call] = [("now", {"q": {"a": "{"}}), ("now", {"x": {"q": 1}, "a": [{"q": 2}]})]
    before = 'A "quote", {braces}: [1] <' if NATIVE[name].before else ""
    text = f"{before}{NATIVE[name].write(calls)}"
    walker = Walker(found, BYTES, 0)
    begun = text[: text.rindex('"a"')]
    for known in ("x", "q"):
        constraint = walker.constraint(f'{begun}"{known}'.encode())
        assert (b'"' in walker.texts(constraint)) is (known != "x"), (known, begun)


@pytest.mark.parametrize("together", [False, True])
def test_an_answer_that_is_resumed_keeps_its_names(together: bool) -> None:
    """Where masks are filled alone, and together with others."""
    made = constraints()
    wish = ConstraintWish(1, sampling_of("few letters"), tokens('{"ab":1,"b":1,"'))
    made.start(wish)
    while not (news := made.poll()):
        pass
    constraint = news[0].outcome
    assert isinstance(constraint, Constraint)
    assert constraint.is_ready
    masks = np.zeros((2, mask_words(VOCAB)), np.int32)
    made.fill([MaskWish(0, constraint, [])], masks[:1], math.inf)
    constraint.take(tokens("b")[0])
    other = constraint_of(wish._replace(accepted_ids=tokens('{"b":1,"ab')))
    constraint.mask_s = other.mask_s = 1e-5 if together else 0.0
    made.fill([MaskWish(0, constraint, []), MaskWish(1, other, [])], masks, math.inf)
    for row, begin in zip(masks, ("b", "ab"), strict=True):
        allowed = {vocabulary().tokens.by_id[i] for i in allowed_by(row)}
        assert {b"a", b"b"} <= allowed, begin
        assert (b'"' in allowed) is (begin == "ab")
    made.close()
