"""Encoders that are served: tiny random models of transformers' own classes, a row for each."""

from typing import Any, NamedTuple

from transformers import BertConfig, PretrainedConfig, RobertaConfig, XLMRobertaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 70,
    "pad_token_id": 1,
    "initializer_range": 0.15,
}


class Row(NamedTuple):
    """An encoder. dense: all its matrices, as PEFT's targets. head: modules of its score head that
    an adapter may have whole beside `classifier`."""

    config: type[PretrainedConfig]
    few: tuple[str, ...]
    dense: tuple[str, ...]
    settings: dict[str, Any] = {}
    head: tuple[str, ...] = ()

    def make(self, **settings: Any) -> PretrainedConfig:
        return self.config(**{**SIZES, **self.settings, **settings})


_BERT = ("query", "value"), ("query", "key", "value", "dense")
ENCODERS: dict[str, Row] = {
    "bert": Row(BertConfig, *_BERT, head=("pooler",)),
    "bert-relu": Row(
        BertConfig, *_BERT, {"hidden_act": "relu", "layer_norm_eps": 1e-5}, ("pooler",)
    ),
    "roberta": Row(RobertaConfig, *_BERT),
    "xlm-roberta": Row(XLMRobertaConfig, *_BERT, {"type_vocab_size": 1}),
}
