"""Limits on what a grammar may cost. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of routers and workers. Fields are their options `--grammar-…`.

    source_bytes: of the text. nesting: brackets within brackets, of JSON in the text, too.
    compile_s: processor time of compiling it. memory_bytes: for compiling it.
    """

    source_bytes: int = field(default=256 << 10, metadata={"fixed": True})
    nesting: int = field(default=100, metadata={"fixed": True})
    compile_s: float = field(default=5.0, metadata={"fixed": True})
    memory_bytes: int = field(default=512 << 20, metadata={"fixed": True})


@dataclass(frozen=True, slots=True)
class ServedGrammarLimits(GrammarLimits):
    """Limits of a worker, which also keeps compiled grammars and fills masks.

    mask_s: processor time for one mask; a sequence that needs more ends, and its grammar is refused
    while the cache remembers it. threads: grammars compiled at once. cache_entries, cache_bytes: of
    compiled grammars, by their texts.
    """

    mask_s: float = field(default=0.1, metadata={"fixed": True})
    threads: int = field(default=3, metadata={"fixed": True})
    cache_entries: int = field(default=256, metadata={"fixed": True})
    cache_bytes: int = field(default=64 << 20, metadata={"fixed": True})
