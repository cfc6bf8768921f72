"""Encoders that are served: tiny random models of transformers' own classes, a row for each."""

from typing import Any, NamedTuple

from transformers import (
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

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
_DEBERTA = ("query_proj", "value_proj"), ("query_proj", "key_proj", "value_proj", "dense")
_DISTANCES: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 12,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_MODERN = {"local_attention": 10, "global_attn_every_n_layers": 2, "bos_token_id": 0}
_MODERN |= {"eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
_BIASED = dict.fromkeys(_BIASES, True)
ENCODERS: dict[str, Row] = {
    "bert": Row(BertConfig, *_BERT, head=("pooler",)),
    "bert-relu": Row(
        BertConfig, *_BERT, {"hidden_act": "relu", "layer_norm_eps": 1e-5}, ("pooler",)
    ),
    "roberta": Row(RobertaConfig, *_BERT),
    "distilbert": Row(
        DistilBertConfig,
        ("q_lin", "v_lin"),
        ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
        {"dim": 48, "hidden_dim": 112, "n_layers": 3, "n_heads": 3},
        ("pre_classifier",),
    ),
    "mpnet": Row(MPNetConfig, ("q", "v"), ("q", "k", "v", "o", "dense")),
    "deberta": Row(DebertaV2Config, *_DEBERTA, _DISTANCES, ("pooler",)),
    "deberta-own": Row(
        DebertaV2Config,
        ("query_proj", "pos_key_proj"),
        (*_DEBERTA[1], "pos_key_proj", "pos_query_proj"),
        {
            "hidden_size": 60,
            "relative_attention": True,
            "pos_att_type": "c2p|p2c",
            "max_relative_positions": 9,
            "type_vocab_size": 2,
        },
        ("pooler",),
    ),
    "deberta-plain": Row(
        DebertaV2Config,
        *_DEBERTA,
        {"pos_att_type": ["c2p"], "pooler_hidden_act": "tanh"},
        ("pooler",),
    ),
    "electra": Row(ElectraConfig, *_BERT, {"embedding_size": 48}),
    "electra-narrow": Row(
        ElectraConfig,
        ("query", "embeddings_project"),
        (*_BERT[1], "embeddings_project"),
        {"embedding_size": 20},
    ),
    "modernbert": Row(ModernBertConfig, ("Wqkv",), ("Wqkv", "Wo", "Wi"), _MODERN, ("head",)),
    "modernbert-mean": Row(
        ModernBertConfig,
        ("Wqkv",),
        ("Wqkv", "Wo", "Wi"),
        {**_MODERN, **_BIASED, "classifier_pooling": "mean", "classifier_activation": "silu"},
        ("head",),
    ),
    "xlm-roberta": Row(XLMRobertaConfig, *_BERT, {"type_vocab_size": 1}),
}
