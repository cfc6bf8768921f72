"""What the masks of a schema let through, byte by byte."""

import json
from typing import Any

from llguidance import LLMatcher

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.json_rules import json_grammar
from tests.vocabularies import byte_vocabulary

_END = 0
_BYTES = byte_vocabulary(1, (_END,), {_END: b"</s>"})


def source(schema: dict[str, Any] | bool) -> str:
    lark = Lark()
    return lark.source(json_grammar(lark, schema))


def matcher_of(schema: dict[str, Any] | bool) -> LLMatcher:
    return compile_grammar(_BYTES, source(schema), GrammarLimits())


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether this may be a whole answer. The matcher is as before."""
    copy = matcher.deep_copy()
    ids = [1 + byte for byte in text.encode()]
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


def writes(schema: dict[str, Any] | bool, value: Any) -> bool:
    """Whether the value may be an answer."""
    return accepts(matcher_of(schema), json.dumps(value, ensure_ascii=False))
