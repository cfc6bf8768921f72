"""A writer of grammars in llguidance's Lark. Pure.

Rules have lower-case names, terminals upper-case ones; each name is used once. Methods
return expressions for the bodies of other rules. Syntax: `docs/syntax.md` of llguidance.
"""

import json
import re
from collections.abc import Iterable, Mapping

# A text of any length, newlines too.
ANY_TEXT = r"/(?s:.*)/"


class Lark:
    """One grammar that is being written.

    special_ids: tokens that are no text, by their spelling; a literal that contains one of these
    spellings demands the token.
    names_once: a check outside the grammar keeps names of JSON objects from coming again.
    has_free_names: the grammar lets some come again. names_run_out: some of these begin as only
    so many names do.
    """

    names_once = has_free_names = names_run_out = False

    def __init__(self, special_ids: Mapping[str, int] | None = None) -> None:
        self._special_ids = dict(special_ids or {})
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        parts = "|".join(map(re.escape, longest_first))
        self._special = re.compile(f"({parts})") if parts else None
        self._rules: list[str] = []

    def rule(self, stem: str, body: str, options: str = "") -> str:
        """A rule's name. options: such as `lazy`, for a body that ends as soon as it can."""
        return self._named(stem.lower(), body, options)

    def terminal(self, stem: str, body: str) -> str:
        """A terminal's name. Its body may hold literals, regexes and terminals alone."""
        return self._named(stem.upper(), body, "")

    def _named(self, stem: str, body: str, options: str) -> str:
        name = f"{stem}_{len(self._rules)}"
        bracketed = f"[{options}]" if options else ""
        self._rules.append(f"{name}{bracketed}: {body}")
        return name

    def reserve(self, stem: str) -> str:
        """A rule's name, to be defined later: for rules that name each other."""
        name = f"{stem.lower()}_{len(self._rules)}"
        self._rules.append("")
        return name

    def define(self, name: str, body: str, parameter: str = "") -> None:
        """The rule of a reserved name. parameter: such as `::_`."""
        self._rules[int(name.rpartition("_")[2])] = f"{name}{parameter}: {body}"

    def nested(self, source: str) -> str:
        """An expression for all that a whole grammar accepts, with names of its own."""
        return self.rule("nested", f"%lark {{\n{source}\n}}")

    def literal(self, text: str) -> str:
        """The expression for exactly this text; "" is the empty one."""
        pieces = self._special.split(text) if self._special else [text]
        words = [self._word(piece) for piece in pieces if piece]
        return "(" + " ".join(words) + ")" if len(words) > 1 else "".join(words) or '""'

    def _word(self, piece: str) -> str:
        token_id = self._special_ids.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def has_special(self, text: str) -> bool:
        """Whether the literal of this text demands a token that is no text."""
        return bool(self._special and self._special.search(text))

    def regex(self, pattern: str) -> str:
        """A text that the whole pattern matches (Rust's syntax)."""
        escaped = re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.S)
        return "/" + escaped.replace("\n", r"\n") + "/"

    def either(self, expressions: Iterable[str]) -> str:
        return "(" + " | ".join(expressions) + ")"

    def source(self, start: str) -> str:
        """The grammar's text; answers are what the expression `start` accepts."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"
