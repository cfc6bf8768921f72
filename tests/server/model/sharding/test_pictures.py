"""Pictures in prompts of a model that two processes share."""

from functools import partial
from pathlib import Path

import pytest

from tests.server.model.families.pictured import Pictured, text
from tests.server.model.families.test_tower_adapters import lora_of
from tests.server.model.sharding.processes import GroupDriver

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
    ),
]


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_5_vl", "llava", "llava_next", "mistral3", "qwen3_vl", "qwen3_5", "qwen3_5_moe"),
        *("gemma3", "gemma4", "gemma4_small", "gemma4_unified", "idefics3", "internvl", "smolvlm"),
    ],
)
def test_each_process_reads_every_picture(kind: str, tmp_path: Path) -> None:
    make = partial(GroupDriver, shards=2, meeting=tmp_path / "meeting")
    served = Pictured(tmp_path / "base", make, shards=2, kind=kind, lora=lora_of(kind))
    engine = served.engine(max_step_tokens=24)
    requests = [
        served.pictured(
            [text(3, 0), "a", text(2, 1), "b"], adapter=served.digest("texts"), max_tokens=3
        ),
        *(
            served.pictured(
                [text(5, 2), "a", text(1, 3)], adapter=served.digest(name), max_tokens=3
            )
            for name in ("short", "every", "tower")
        ),
        served.pictured([text(4, 4), "e", text(2, 5)], max_tokens=3),
    ]
    served.assert_answers(engine, requests)
    served.driver.close()
