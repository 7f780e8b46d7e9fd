"""Encoders, and encoders with decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .entry import COMMON, NO_DROPOUT, VOCAB, Entry

DEBERTA = {**COMMON, **NO_DROPOUT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def local_attention(model: Any) -> Any:
    """Longformer without global attention. Its code looks into the mask whether there is some."""

    def no_token_is_global(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "is_global_attn": False}

    for layer in model.longformer.encoder.layer:
        layer.attention.self.register_forward_pre_hook(no_token_is_global, with_kwargs=True)
    return model


ENCODERS: Mapping[str, Entry] = {
    "BERT": Entry("BertForMaskedLM", {**COMMON, **NO_DROPOUT}),
    "RoBERTa": Entry("RobertaForMaskedLM", {**COMMON, **NO_DROPOUT}),
    "ALBERT": Entry("AlbertForMaskedLM", {**COMMON, **NO_DROPOUT, "embedding_size": 16}, brief=True),
    "DistilBERT": Entry(
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCAB,
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
        },
        brief=True,
    ),
    "ELECTRA": Entry("ElectraForMaskedLM", {**COMMON, **NO_DROPOUT, "embedding_size": 16}, brief=True),
    "ModernBERT": Entry(
        "ModernBertForMaskedLM", {**COMMON, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, brief=True
    ),
    "DeBERTa-v2": Entry("DebertaV2ForMaskedLM", DEBERTA, brief=True),
    "DeBERTa-v2, classes": Entry(
        "DebertaV2ForSequenceClassification",
        {**DEBERTA, "num_labels": 5, "problem_type": "single_label_classification"},
        "classes",
        brief=True,
    ),
    "Longformer": Entry(
        "LongformerForMaskedLM",
        {**COMMON, **NO_DROPOUT, "attention_window": [4, 4], "onnx_export": True},
        prepare=local_attention,
        brief=True,
    ),
    "XLNet": Entry(
        "XLNetLMHeadModel",
        {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0},
        brief=True,
    ),
    "FNet": Entry("FNetForMaskedLM", {**COMMON, **NO_DROPOUT, "tpu_short_seq_length": 8}, "causal", brief=True),
}

ENCODER_DECODERS: Mapping[str, Entry] = {
    "T5": Entry(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    "BART": Entry("BartForConditionalGeneration", SEQ2SEQ, "seq2seq", brief=True),
    "mBART": Entry("MBartForConditionalGeneration", SEQ2SEQ, "seq2seq", brief=True),
    "Pegasus": Entry("PegasusForConditionalGeneration", SEQ2SEQ, "seq2seq", brief=True),
    "Marian": Entry("MarianMTModel", {**SEQ2SEQ, "forced_eos_token_id": 2}, "seq2seq", brief=True),
    "M2M-100": Entry(
        "M2M100ForConditionalGeneration",
        {**SEQ2SEQ, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        "seq2seq",
        brief=True,
    ),
}
