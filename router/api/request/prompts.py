"""One field that holds one text or several, or their tokens. Pure."""

from loraplex.router.api.request.body import require


def prompts_of(
    given: str | list[str | int | list[int]], param: str, most: int
) -> tuple[str | list[int], ...]:
    """One kind only: texts, lists of ids, or the ids of a single prompt. Raises RequestError."""
    if isinstance(given, str):
        return (given,)
    require(given, "expected at least one prompt", param)
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        require(len(ids) == len(given), "expected token ids only, or none", param)
        return (ids,)
    require(len(given) <= most, f"expected at most {most} prompts, got {len(given)}", param)
    several = tuple(item for item in given if not isinstance(item, int))
    texts = sum(isinstance(item, str) for item in several)
    require(texts in (0, len(several)), "expected texts only, or lists of token ids only", param)
    require(all(item or item == "" for item in several), "expected no empty list", param)
    return several
