"""Bounds of the scheduler that no device sets. Pure."""

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits and shares that the scheduler keeps. max_waiting: sequences that wait to run.
    max_loading: adapters that are loaded at once; as many more may come without being asked for.

    drain_after_s: how long a staged adapter waits for room before other adapters drain. max_draft:
    tokens of a sequence's draft, 0 = none has one. draft_memory: bytes of answers that are kept for
    drafts. step_target_s: of a step with prompts beside streams. prompt_share: of the device's
    time, for prompts of one tenant beside streams of others. batch_share: the same for prompts of
    all batches while others run or wait.
    """

    max_waiting: int = 1024
    max_loading: int = 8
    drain_after_s: float = 1.0
    step_target_s: float = 0.06
    prompt_share: float = 0.5
    batch_share: float = 0.125
    max_draft: int = 0
    draft_memory: int = 64 << 20
