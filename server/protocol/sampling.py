"""How tokens are drawn. Pure."""

import msgspec


class NamesOnce(msgspec.Struct, frozen=True, array_like=True):
    """JSON in whose objects each name stands once, though its grammar lets names come again. The
    grammar spells each name in one way alone.

    begins: texts that such JSON follows, or brackets that begin it. opens: of reasoning at the
    output's begin; "" = it has begun. closes: of reasoning; "" = there is none. run_out: some
    names have begins with which only so many names begin.
    """

    begins: tuple[str, ...]
    opens: str = ""
    closes: str = ""
    run_out: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning ends after so many tokens of its text. opens: tokens that begin it, () = it has
    begun. closes: tokens that end it, at least one."""

    tokens: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. Defaults change nothing.

    temperature: 0 = greedy. top_k: 0 = off. top_p, typical_p: 1 = off. min_p: 0 = off.
    repetition_penalty: over prompt and output (1 = off); frequency and presence: over the output.
    max_tokens: of output, accepted ones included.
    logprobs: None = none; n >= 0 = the chosen token's, with the n most likely beside it;
    prompt_logprobs: the same for the prompt's tokens.
    stop_token_ids: end the output, as the model's own ends do: end_token_ids and the worker's.
    grammar: what the output must be, for llguidance: Lark, or JSON of its grammars; "" = anything.
    allowed_token_ids: no others are drawn, the ends of the output excepted; () = all.
    bad_words: sequences of tokens that are never completed.
    logprob_token_ids: tokens whose logprobs are reported beside those of `logprobs` and
    `prompt_logprobs`, wherever these are.
    thinking: bound of the reasoning; None = none.
    names_once: what the grammar does not say of names; None = all of it.
    Logprobs are those of the raw logits (log-softmax before temperature, penalties and truncation).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    end_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    names_once: NamesOnce | None = None
    thinking: ThinkingBudget | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens may not be drawn, which of them being known a token ahead alone."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words or self.thinking)
