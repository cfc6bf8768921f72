"""A plugin of pytest: SGLang's kits of tests find a server of this project."""

from unittest import TestCase

from server_lines import DEMO
from stand_ins import install
from transformers import PreTrainedTokenizerFast


def get_tokenizer(*_: object, **__: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(DEMO / "model")


install(
    *("sglang", "sgl_kernel", "lm_eval", "aiohttp", "tabulate", "datasets"),
    real="sglang.test.kits",
    CustomTestCase=TestCase,
    get_tokenizer=get_tokenizer,
)
