"""What a classifier scores. Pure."""

from typing import Literal

import msgspec

ScoreActivation = Literal["softmax", "sigmoid", "none"]
# The tensor of a classifier's head.
SCORE = "score.weight"


class ClassesSpec(msgspec.Struct, frozen=True):
    """What a classifier scores: a number for each label, from the last norm's output of the last
    token that is no padding. activation: what makes probabilities of scores. pad_token_id: None =
    no token is padding."""

    labels: tuple[str, ...]
    activation: ScoreActivation
    pad_token_id: int | None
