"""When a sequence is over, and what its events say. Pure."""

from collections.abc import Collection

from server.constraints.constraint import Constraint
from server.engine.messages import SequenceEvent
from server.engine.scheduling.sequence import Sequence
from server.protocol import ErrorCode, Finish, TokenEvent, TokenLogprob


def finish_at(sequence: Sequence, token_id: int, eos: Collection[int]) -> Finish | None:
    """Whether `token_id`, the next of its output, is the last."""
    if _is_stop(sequence, token_id, sequence.num_output, eos):
        return "stop"
    return "length" if len(sequence.tokens) + 1 >= sequence.limit else None


def finished_before(sequence: Sequence, eos: Collection[int]) -> Finish | None:
    """Whether there is nothing to compute: a resumed request may lack its terminal event only."""
    accepted = sequence.request.accepted_ids
    if accepted and _is_stop(sequence, accepted[-1], len(accepted) - 1, eos):
        return "stop"
    if len(sequence.tokens) >= sequence.limit and not sequence.needs_prompt_logprobs:
        return "length"
    return None


def _is_stop(sequence: Sequence, token_id: int, index: int, eos: Collection[int]) -> bool:
    sampling = sequence.request.sampling
    if index < sampling.min_tokens:
        return False
    is_end = token_id in eos or token_id in sampling.end_token_ids
    return (is_end and not sampling.ignore_eos) or token_id in sampling.stop_token_ids


def drawn_events(
    sequence: Sequence, token_id: int, logprob: TokenLogprob | None, eos: Collection[int]
) -> list[SequenceEvent]:
    """The events of the next token of its output; the last one may be terminal.

    A token after which its constraint allows no other is no end: the terminal event follows it.
    """
    finish = finish_at(sequence, token_id, eos)
    constraint = sequence.constraint
    if constraint is None:
        return [token_event(sequence, token_id, logprob, finish)]
    if constraint.state != "open":  # since its mask: the token says nothing
        return [_ended(sequence, constraint)]
    state = "open" if finish == "stop" else constraint.take(token_id)
    if state == "failed":
        return [_ended(sequence, constraint)]
    if state == "over":
        return [token_event(sequence, token_id, logprob), _ended(sequence, constraint)]
    return [token_event(sequence, token_id, logprob, finish)]


def _ended(sequence: Sequence, constraint: Constraint) -> SequenceEvent:
    if constraint.state == "over":
        return token_event(sequence, None, finish="stop")
    problem = f"grammar: it cannot be kept to any further: {constraint.problem}"
    return error_event(sequence, "bad_grammar", problem)


def not_finite(adapter: str | None) -> str:
    """What is told of a sequence whose logits are not finite. adapter: its digest."""
    if adapter is None:
        return "the model gave logits that are not finite"
    return (
        f"the model gave logits that are not finite with the adapter of digest {adapter[:12]}: "
        "its weights or its scale may be too large for this dtype"
    )


def token_event(
    sequence: Sequence,
    token_id: int | None,
    logprob: TokenLogprob | None = None,
    finish: Finish | None = None,
) -> SequenceEvent:
    """The next event, with at most one token. The sequence then knows the token."""
    request, index, first = sequence.request, sequence.num_output, not sequence.started
    scored = sequence.prompt_logprobs
    prompt_logprobs = None
    if sequence.needs_prompt_logprobs and len(scored) + 1 == sequence.prompt_len:
        prompt_logprobs = (TokenLogprob(sequence.tokens[0], None), *scored)
    if token_id is not None:
        sequence.tokens.append(token_id)
    sequence.started = True
    event = TokenEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        choice=request.choice,
        index=index,
        token_ids=() if token_id is None else (token_id,),
        finish=finish,
        logprobs=None if logprob is None or token_id is None else (logprob,),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=sequence.cached_tokens if first else None,
        load_s=sequence.load_s or None if first else None,
    )
    return SequenceEvent(sequence.key, event)


def error_event(sequence: Sequence, code: ErrorCode, message: str) -> SequenceEvent:
    request = sequence.request
    event = TokenEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        choice=request.choice,
        index=sequence.num_output,
        token_ids=(),
        finish="error",
        error=code,
        message=message,
    )
    return SequenceEvent(sequence.key, event)
