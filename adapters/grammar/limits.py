"""Limits on what a grammar may cost. Pure."""

from dataclasses import dataclass

from loraplex.adapters.common.option import fixed


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of routers and workers. Fields are their options `--grammar-…`.

    source_bytes: of the text. nesting: brackets within brackets, of JSON in the text, too.
    compile_s: processor time of compiling it. memory_bytes: for compiling it.
    """

    source_bytes: int = fixed(256 << 10)
    nesting: int = fixed(100)
    compile_s: float = fixed(5.0)
    memory_bytes: int = fixed(512 << 20)


@dataclass(frozen=True, slots=True)
class ServedGrammarLimits(GrammarLimits):
    """Limits of a worker, which also keeps compiled grammars and fills masks.

    mask_s: processor time for one mask; a sequence that needs more ends, and its grammar is refused
    while the cache remembers it. threads: grammars compiled at once. cache_entries, cache_bytes: of
    compiled grammars, by their texts.
    """

    mask_s: float = fixed(0.1)
    threads: int = fixed(3)
    cache_entries: int = fixed(256)
    cache_bytes: int = fixed(64 << 20)
