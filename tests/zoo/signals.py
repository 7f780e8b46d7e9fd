"""Sound and time series."""

from __future__ import annotations

from collections.abc import Mapping

from .entry import COMMON, NO_DROPOUT, VOCAB, Entry

WAV2VEC2 = {
    **COMMON, "vocab_size": 32, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "classifier_proj_size": 16,
    "num_labels": 5, "ctc_loss_reduction": "mean",
}  # fmt: skip

SIGNALS: Mapping[str, Entry] = {
    "Whisper": Entry(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "speech",
    ),
    "wav2vec 2.0, classes": Entry("Wav2Vec2ForSequenceClassification", WAV2VEC2, "sound", brief=True),
    "wav2vec 2.0, CTC": Entry("Wav2Vec2ForCTC", WAV2VEC2, "transcribed", brief=True),
    "HuBERT": Entry("HubertForSequenceClassification", WAV2VEC2, "sound", brief=True),
    "Audio Spectrogram Transformer": Entry(
        "ASTForAudioClassification",
        {
            **COMMON,
            **NO_DROPOUT,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 4,
            "time_stride": 4,
            "num_labels": 5,
        },
        "spectrogram",
        brief=True,
    ),
    "PatchTST": Entry(
        "PatchTSTForPrediction",
        {
            **NO_DROPOUT,
            "num_input_channels": 3,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "loss": "mse",
        },
        "series",
        rows_apart=False,
        brief=True,
    ),
}
