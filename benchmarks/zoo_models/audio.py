"""Speech and audio models of transformers and torchaudio, small, with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from zoo_models.entry import Entry, random_transformer

SPEECH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hubert": ("HubertForCTC", SPEECH),
    "wav2vec2": ("Wav2Vec2ForCTC", SPEECH),
    "wav2vec2_layer_norm": ("Wav2Vec2ForCTC", SPEECH | {"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "wavlm": ("WavLMForCTC", SPEECH),
}
MOST_USED = {"wav2vec2", "whisper"}


def speech(name: str) -> Entry:
    """Return a model that reads samples of sound, f32[n, samples]."""
    kind, options = KINDS[name]
    return Entry(
        random_transformer(kind, **options),
        lambda count: {"input_values": torch.randn(count, 4000)},
        {"6000 samples": {"input_values": torch.randn(2, 6000)}},
        "transformer",
        name in MOST_USED,
        {"input_values": {0: Dim.AUTO, 1: Dim.AUTO}},
    )


def whisper() -> Entry:
    """Return Whisper: log-mel spectrograms and tokens in, logits out."""
    model = random_transformer(
        "WhisperForConditionalGeneration",
        vocab_size=500,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch(count: int) -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(count, 80, 200), "decoder_input_ids": torch.randint(5, 500, (count, 12))}

    return Entry(model, batch, {}, "transformer", most_used=True)


def spectrogram_transformer() -> Entry:
    """Return the audio spectrogram transformer."""
    model = random_transformer(
        "ASTForAudioClassification",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_length=128,
        num_mel_bins=64,
    )
    return Entry(model, lambda count: {"input_values": torch.randn(count, 128, 64)}, {}, "transformer")


def of_torchaudio(name: str) -> Entry:
    """Return a model of torchaudio by its name."""
    from torchaudio import models

    torch.manual_seed(0)
    if name == "conv_tasnet":
        return Entry(
            models.ConvTasNet(msk_num_feats=64, msk_num_hidden_feats=64).eval(), lambda n: (torch.randn(n, 1, 4000),)
        )
    if name == "wav2letter":
        return Entry(models.Wav2Letter(input_type="mfcc", num_features=40).eval(), lambda n: (torch.randn(n, 40, 200),))
    if name == "deepspeech":
        return Entry(models.DeepSpeech(40, n_hidden=128).eval(), lambda n: (torch.randn(n, 1, 50, 40),))
    conformer = models.Conformer(40, 4, 64, 2, 15)
    return Entry(conformer.eval(), lambda n: (torch.randn(n, 60, 40), torch.full((n,), 60)))


class KeywordSpotter(nn.Module):
    """A depthwise separable network for spectrograms, as in the Hello Edge and MLPerf Tiny benchmarks."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, channels, (10, 4), 2, (5, 1)), nn.BatchNorm2d(channels), nn.ReLU()]
        for _ in range(4):
            layers += [
                nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
            layers += [nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels), nn.ReLU()]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(channels, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


def keyword_spotter() -> Entry:
    """Return a keyword spotting network."""
    torch.manual_seed(0)
    return Entry(KeywordSpotter().eval(), lambda count: (torch.randn(count, 1, 49, 10),))


MODELS = (
    {name: partial(speech, name) for name in KINDS}
    | {"whisper": whisper, "audio_spectrogram_transformer": spectrogram_transformer, "keyword_spotter": keyword_spotter}
    | {
        f"torchaudio/{name}": partial(of_torchaudio, name)
        for name in ("conformer", "conv_tasnet", "deepspeech", "wav2letter")
    }
)
