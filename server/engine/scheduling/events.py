"""Events of sequences, and when a sequence ends. Pure."""

from collections.abc import Collection

import msgspec

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.engine.messages import SequenceEvent
from loraplex.server.engine.plan import SeqSlice
from loraplex.server.engine.scheduling.sequence import Sequence
from loraplex.server.protocol import DeviceCost, ErrorCode, Finish, TokenEvent, TokenLogprob


def finished_before(sequence: Sequence, eos: Collection[int]) -> Finish | None:
    """The finish of a request with nothing to compute. A resumed request may lack only its terminal
    event."""
    accepted = sequence.request.accepted_ids
    if accepted and _is_stop(sequence, accepted[-1], len(accepted) - 1, eos):
        return "stop"
    is_read = sequence.needs_prompt_logprobs or sequence.request.vector is not None
    if len(sequence.tokens) >= sequence.limit and not is_read:
        return "length"
    return None


def _is_stop(sequence: Sequence, token_id: int, index: int, eos: Collection[int]) -> bool:
    sampling = sequence.request.sampling
    if index < sampling.min_tokens:
        return False
    is_end = token_id in eos or token_id in sampling.end_token_ids
    return (is_end and not sampling.ignore_eos) or token_id in sampling.stop_token_ids


def bad_draw(piece: SeqSlice, token_ids: tuple[int, ...], vocab_size: int) -> str | None:
    """Why these cannot be the tokens that a slice drew, or None."""
    most = piece.num_new if piece.kind == "decode" else 1
    if not 0 < len(token_ids) <= most:
        return f"the model gave {len(token_ids)} tokens, expected 1 to {most}"
    for token_id in token_ids:
        if token_id < 0 or token_id >= vocab_size:
            return f"the model gave token id {token_id}"
    return None


def drawn_event(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    eos: Collection[int],
) -> SequenceEvent:
    """The event of a result. The sequence accepts its tokens up to the first that ends the output;
    tokens behind that are dropped. The event may be terminal.

    logprobs: parallel to token_ids, or empty.
    """
    count, finish = _leading(sequence, token_ids, eos)
    if count < len(token_ids):
        token_ids, logprobs = token_ids[:count], logprobs[:count]
    return token_event(sequence, token_ids, logprobs, finish)


def _leading(
    sequence: Sequence, token_ids: tuple[int, ...], eos: Collection[int]
) -> tuple[int, Finish | None]:
    """How many of the drawn tokens join the output, and the finish if the last of them ends it.

    The sequence's constraint takes note of every one of them but a stop token.
    """
    constraint, index, count = sequence.constraint, sequence.num_output, 0
    left = sequence.limit - len(sequence.tokens)
    for token_id in token_ids:
        if _is_stop(sequence, token_id, index + count, eos):
            return count + 1, "stop"
        if constraint is not None:
            constraint.note(token_id)
        count += 1
        if count >= left:
            return count, "length"
    return count, None


def closed_event(sequence: Sequence, constraint: Constraint) -> SequenceEvent:
    """Return the sequence's terminal event, when the constraint allows no further token."""
    if constraint.state == "over":
        return token_event(sequence, finish="stop")
    problem = f"grammar: it cannot be kept to any further: {constraint.problem}"
    return error_event(sequence, "bad_grammar", problem)


def not_finite(adapter: str | None) -> str:
    """The error message for results that are not finite. adapter: digest, None = the base."""
    if adapter is None:
        return "the model gave numbers that are not finite"
    return (
        f"the model gave numbers that are not finite with the adapter of digest {adapter[:12]}: "
        "its weights or its scale may be too large for this dtype"
    )


def token_event(
    sequence: Sequence,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: Finish | None = None,
    vector: bytes | None = None,
) -> SequenceEvent:
    """The next event. The sequence accepts its tokens."""
    request, index, first = sequence.request, sequence.num_output, not sequence.started
    scored = sequence.prompt_logprobs
    prompt_logprobs = None
    if first and sequence.needs_prompt_logprobs and len(scored) + 1 == sequence.prompt_len:
        prompt_logprobs = (TokenLogprob(sequence.tokens[0], None), *scored)
        for span in request.pictures:  # whose placeholders nobody says
            within = slice(span.start, span.start + span.length)
            nothing = (TokenLogprob(token_id, None) for token_id in sequence.tokens[within])
            before, behind = prompt_logprobs[: within.start], prompt_logprobs[within.stop :]
            prompt_logprobs = (*before, *nothing, *behind)
    sequence.accept(token_ids)
    sequence.started = True
    event = TokenEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        choice=request.choice,
        index=index,
        token_ids=token_ids,
        finish=finish,
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=sequence.cached_tokens if first else None,
        load_s=sequence.load_s or None if first else None,
        vector=vector,
        routed=sequence.take_routed(),
    )
    return SequenceEvent(sequence.key, event)


def with_cost(event: SequenceEvent, sequence: Sequence) -> SequenceEvent:
    """The sequence's terminal event with what it cost, if it cost anything."""
    if not (sequence.device_s or sequence.copy_s):
        return event
    cost = DeviceCost(round(sequence.device_s, 6), round(sequence.copy_s, 6))
    return SequenceEvent(event.key, msgspec.structs.replace(event.event, cost=cost))


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
