"""Images by HTTP with Gemma: answers about them are transformers' and PEFT's, token by token."""

from pathlib import Path

import pytest

from tests.e2e.gemma_model import GemmaOracle, Kind, save_gemma
from tests.e2e.picture_chats import ADAPTER, CHATS, assert_chats
from tests.e2e.serving import running_folder

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
# Gemma's tokenizer has tokens of several ends of lines.
LINES = (ADAPTER, ["Two:\n", "wide", "\nand", "clear", "\n\ndiffer how?"])


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_unified"])
def test_chats_are_those_of_transformers(kind: Kind, tmp_path: Path) -> None:
    save_gemma(tmp_path, kind)
    oracle = GemmaOracle(tmp_path, kind)
    with running_folder(tmp_path, [ADAPTER]) as serving:
        assert_chats(serving, oracle, [*CHATS, LINES])
