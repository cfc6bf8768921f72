"""Compiles a grammar's text to a matcher that holds an answer to it."""

from collections.abc import Iterator
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits

from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary

_MAX_MESSAGE = 500
_FIRST_TOKENS = 24  # that are tried out
# Where more tokens may be next there is free text: its masks are dear, and need no trial.
_MOST_NEXT = 128
# llguidance's own limits: work on expressions at first and for one mask, the parser's items for one
# mask and at one place, the size of one matcher. A checker's process stops at GrammarLimits.
_OWN_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    max_items_in_row=4_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """The grammar is wrong, or costs more than its limits; str() says what."""


class GrammarTooCostly(GrammarError):
    """A grammar costs more than its limits, wrong or not."""


def check_source(grammar: str, limits: GrammarLimits) -> None:
    """Checks a grammar's size before it is compiled. Raises GrammarError for a text that is too
    long or too deeply nested.
    """
    size = len(grammar.encode("utf-8", "surrogatepass"))
    if size > limits.source_bytes:
        message = f"the grammar has {size} bytes, at most {limits.source_bytes} may be"
        raise GrammarTooCostly(message)
    if _nesting(grammar) > limits.nesting:
        raise GrammarTooCostly(f"the grammar is nested more than {limits.nesting} deep")


def _nesting(grammar: str) -> int:
    """Measures the depth of brackets. Strings within double quotes do not count."""
    depth = deepest = 0
    quoted = escaped = False
    for character in grammar:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif character == "\n":
            quoted = False
        elif quoted:
            continue
        elif character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def compile_grammar(vocabulary: Vocabulary, grammar: str, limits: GrammarLimits) -> LLMatcher:
    """Compiles a grammar. A matcher before its first token, whose first mask is known to be within
    the limits.

    It may need a deep stack (`DeepThreads`). A grammar of a stranger is to pass a `GrammarChecker`
    first, since some cost more than llguidance's limits say. The GIL is released meanwhile. Raises
    GrammarError.
    """
    check_source(grammar, limits)
    with _refusing():
        text = _without_forcing(grammar)
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=_OWN_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # of which every copy keeps what was learnt
    _check(matcher)
    return matcher


def try_first_tokens(vocabulary: Vocabulary, matcher: LLMatcher) -> None:
    """Begin two answers, so that a grammar which its first masks cannot hold is refused before it.

    They take the last and the first of the tokens that may be next in turn: else white space would
    follow white space. Raises GrammarError.
    """
    for begin in (0, 1):
        _walk(vocabulary, matcher.deep_copy(), begin)


def _walk(vocabulary: Vocabulary, matcher: LLMatcher, begin: int) -> None:
    for number in range(begin, begin + _FIRST_TOKENS):
        with _refusing():
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            for end in vocabulary.end_ids:
                allowed &= ~(1 << end)
            if allowed and not matcher.is_error():
                token = allowed & -allowed if number % 2 else allowed
                matcher.try_consume_tokens([token.bit_length() - 1])
        _check(matcher)
        if not 0 < allowed.bit_count() <= _MOST_NEXT:
            return


@contextmanager
def _refusing() -> Iterator[None]:
    """Blame the grammar for what llguidance raises."""
    try:
        yield
    except Exception as error:
        raise GrammarError(_short(str(error))) from None
    except BaseException as error:  # a panic of llguidance's
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("llguidance cannot compile the grammar") from None


def _check(matcher: LLMatcher) -> None:
    """Checks that llguidance accepted a grammar. Raises GrammarError."""
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()) or "no answer can keep to the grammar")


def _without_forcing(grammar: str) -> str:
    """The grammar with forced text in any tokens: the model chooses, as without a grammar."""
    if grammar.lstrip().startswith("{"):  # JSON of grammars has no place for it
        return grammar
    return f'{grammar}\n%llguidance {{"no_forcing": true}}'


def _short(message: str) -> str:
    message = message.replace("<non-verbose/>", "").strip()
    if message.startswith("NoExtension"):
        return "no answer can keep to the grammar"
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "…"
