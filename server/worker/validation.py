"""Checks of a router's frames: what the worker uses itself (names, and the digest, which becomes a
path). The engine checks ids, sampling values and the size of answers (`engine/admission.py`). Pure.
"""

import re

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.merge.recipe import recipe_problem
from loraplex.adapters.ref import AdapterRef, check_token
from loraplex.server.engine.admission import Refusal
from loraplex.server.protocol import (
    Abort,
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterPins,
    AdapterPrefetch,
    GenerateRequest,
    VisionCard,
)

MAX_ID_LENGTH = 256
MAX_SALT_LENGTH = 256
MAX_REF_LENGTH = 4096
MAX_PRIORITY = 1 << 20
MAX_DIGESTS = 1 << 14
_UINT64 = 1 << 64
_INT31 = 1 << 31
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_name(frame: GenerateRequest | Abort) -> str | None:
    """Why this frame is no valid frame at all, or None. Such a frame costs the connection."""
    if not 0 < len(frame.request_id) <= MAX_ID_LENGTH:
        return f"request_id must have 1 to {MAX_ID_LENGTH} characters"
    if not 0 <= frame.attempt < _INT31:
        return f"attempt must lie in 0..2^31-1, got {frame.attempt}"
    if frame.choice is not None and not 0 <= frame.choice < _INT31:
        return f"choice must lie in 0..2^31-1, got {frame.choice}"
    return None


def check_id(name: str, value: str) -> str | None:
    """Return what is wrong with an id that a router has chosen, or None. name: of its field."""
    if len(value) > MAX_ID_LENGTH:
        return f"{name} must have at most {MAX_ID_LENGTH} characters"
    return None


def check_digests(frame: AdapterPins | AdapterOrder | AdapterPrefetch) -> str | None:
    """Return what is wrong with a frame about adapters that are here, or None."""
    if len(frame.digests) > MAX_DIGESTS:
        return f"a frame may name at most {MAX_DIGESTS} adapters"
    if not all(map(_DIGEST.fullmatch, frame.digests)):
        return "an adapter must be a digest of 64 hexadecimal digits"
    return None


def check_load(frame: AdapterLoad) -> AdapterError | None:
    """Why this adapter cannot be loaded, or None; it fails alone, as its text is a client's.

    The token is never quoted. What a reference may say is the sources' business.
    """
    if frame.expected_digest is not None and not _DIGEST.fullmatch(frame.expected_digest):
        return AdapterError("invalid", "the expected digest must be 64 hexadecimal digits")
    return _check_source(frame.ref, frame.token)


def check_merge(frame: AdapterMerge) -> AdapterError | None:
    """Return what is wrong with a merge, or None."""
    problem = recipe_problem(frame.recipe)
    if problem is None and len(frame.sources) != len(frame.recipe.members):
        problem = f"{len(frame.recipe.members)} members with {len(frame.sources)} sources"
    if problem is not None:
        return AdapterError("invalid", f"these adapters cannot be merged: {problem}")
    errors = (_check_source(source.ref, source.token) for source in frame.sources)
    return next((error for error in errors if error is not None), None)


def _check_source(ref: AdapterRef, token: str | None) -> AdapterError | None:
    if max(len(ref.name), len(ref.revision or "")) > MAX_REF_LENGTH:
        return AdapterError("bad_ref", f"a reference has at most {MAX_REF_LENGTH} characters")
    try:
        check_token(token)
    except AdapterError as error:
        return error
    return None


def check_request(
    request: GenerateRequest, max_context: int, vision: VisionCard | None
) -> Refusal | None:
    """Why this sequence cannot be taken, or None; only this sequence ends. vision: of the model."""
    if len(request.prompt_ids) > max_context:
        message = (
            f"the prompt has {len(request.prompt_ids)} tokens; prompt and output together can have"
            f" at most {max_context}"
        )
        return Refusal("context_length", message)
    problem = _check_envelope(request) or _check_pictures(request, vision)
    return Refusal("invalid_request", problem) if problem else None


def _check_envelope(request: GenerateRequest) -> str | None:
    if request.adapter is not None and not _DIGEST.fullmatch(request.adapter):
        return "adapter must be a digest of 64 hexadecimal digits"
    if not 0 <= request.seed < _UINT64:
        return f"seed must lie in 0..2^64-1, got {request.seed}"
    if abs(request.priority) > MAX_PRIORITY:
        return f"priority must lie within +-{MAX_PRIORITY}, got {request.priority}"
    if len(request.salt) > MAX_SALT_LENGTH:
        return f"salt must have at most {MAX_SALT_LENGTH} characters"
    return check_id("tenant", request.tenant)


def _check_pictures(request: GenerateRequest, vision: VisionCard | None) -> str | None:
    free = 0
    for span in request.pictures:
        if vision is None:
            return "the model reads no pictures"
        if not _DIGEST.fullmatch(span.picture):
            return "a picture must be a digest of 64 hexadecimal digits"
        tokens = vision.form.tokens(span.grid) if vision.form.fits(span.grid) else 0
        if not 0 < tokens <= span.length:
            return f"a picture's grid {span.grid} does not make {span.length} tokens"
        end = span.start + span.length
        held = request.prompt_ids[span.start : end]
        is_there = span.start >= free and len(held) == span.length
        ids = vision.ids(span.grid) if is_there else []
        if not is_there or held != ids[vision.within(ids)]:
            return f"the prompt has no place for a picture at {span.start}"
        free = end
    return None
