"""Models that were taken blind: the first families of transformers and timm that the zoo lacked, by the alphabet.

docs/zoo.md says how they were chosen. Configurations are small and weights random.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from zoo_models.entry import Call, Entry, draw_statistics, image_entry, random_transformer, settle_statistics
from zoo_models.text import GROUPED, SMALL, WORDS, of_class

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "coat_tiny": (224, {}),
    "convit_tiny": (224, {}),
    "cpubone_nano": (224, {}),
    "csatv2": (256, {}),
    "cspnext_tiny": (224, {}),
    "davit_tiny": (224, {}),
    "deepseek_vit_412m": (112, {"embed_dim": 128, "depth": 2, "num_heads": 4, "img_size": 112}),
    "efficientformerv2_s0": (224, {}),
    "efficientvim_m1": (224, {}),
    "halonet_h1": (256, {}),
}
"""The smallest model of each family, with height and width of the images and options."""
DECODERS = {
    "afmoe": (
        "AfmoeForCausalLM",
        GROUPED | {"head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "apertus": ("ApertusForCausalLM", GROUPED | {"pad_token_id": 0}),
    "arcee": ("ArceeForCausalLM", GROUPED),
}
TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
IMAGE_TOKEN, SOUND_TOKEN, LAST_TOKEN = 4, 4, WORDS - 1


def of_timm(name: str) -> Entry:
    """Return a classifier of timm by its name."""
    import timm

    size, options = TIMM[name]
    torch.manual_seed(0)
    return image_entry(timm.create_model(name, pretrained=False, **options), size)


def two_towers(kind: str, text: dict[str, Any], vision: dict[str, Any], features: int = 32) -> Entry:
    """Return a model that maps images and texts into one space.

    Args:
        kind: class of transformers.
        text: options of the text encoder.
        vision: options of the image encoder.
        features: size of the space.
    """
    model = random_transformer(kind, text_config=text, vision_config=vision, projection_dim=features)
    draw_statistics(model)

    def batch(count: int) -> Call:
        ids = torch.randint(5, WORDS - 1, (count, 16))
        ids[:, -1] = LAST_TOKEN
        pixels = torch.randn(count, 3, 64, 64)
        return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}

    settle_statistics(model, **batch(4))
    return Entry(model, batch, {}, "transformer")


def tokens_with(count: int, placeholder: int, places: int) -> dict[str, torch.Tensor]:
    """Return token ids whose first ``places`` are placeholders of an image or of sound, with an attention mask."""
    ids = torch.randint(5, WORDS - 1, (count, places + 12))
    ids[:, :places] = placeholder
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def aria() -> Entry:
    """Return Aria: images and tokens in, logits out."""
    text = GROUPED | {"moe_num_experts": 4, "moe_topk": 2, "pad_token_id": 0}
    model = random_transformer(
        "AriaForConditionalGeneration",
        text_config=transformers.AriaTextConfig(**text),
        vision_config=transformers.Idefics3VisionConfig(**TOWER, image_size=64, patch_size=16),
        projector_patch_to_query_dict={16: 8},
        image_token_index=IMAGE_TOKEN,
    )
    for module in model.modules():
        if isinstance(getattr(module, "query", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.query, std=0.5)  # queries that begin with zeros

    def batch(count: int) -> Call:
        return tokens_with(count, IMAGE_TOKEN, 8) | {"pixel_values": torch.randn(count, 3, 64, 64)}

    return Entry(model, batch, {}, "transformer")


def apertus1p5() -> Entry:
    """Return Apertus 1.5: images and tokens in, logits out. Images are tokenized by a network of their own."""
    model = random_transformer(
        "Apertus1p5ForConditionalGeneration",
        text_config=transformers.Apertus1p5TextConfig(**(GROUPED | {"pad_token_id": 0, "vocab_size": 5000})),
        vision_config=transformers.Apertus1p5VisionTokenizerConfig(
            codebook_size=256,
            embed_dim=16,
            latent_channels=16,
            base_channels=32,
            channel_multiplier=[1, 2],
            num_res_blocks=1,
            attn_resolutions=[16],
            resolution=32,
        ),
        image_token_id=IMAGE_TOKEN,
        image_token_offset=WORDS,
        audio_token_offset=WORDS + 256,
    )

    def batch(count: int) -> Call:
        pictures = {"pixel_values": torch.randn(count, 3, 32, 32), "image_sizes": torch.full((count, 2), 32)}
        return tokens_with(count, IMAGE_TOKEN, 256) | pictures

    return Entry(model, batch, {}, "transformer")


def audioflamingo3() -> Entry:
    """Return Audio Flamingo 3: spectrograms and tokens in, logits out."""
    model = random_transformer(
        "AudioFlamingo3ForConditionalGeneration",
        audio_config=transformers.AudioFlamingo3EncoderConfig(**TOWER, num_mel_bins=40, max_source_positions=32),
        text_config=transformers.Qwen2Config(**GROUPED),
        audio_token_id=SOUND_TOKEN,
    )

    def batch(count: int) -> Call:
        sound = {"input_features": torch.randn(count, 40, 64), "input_features_mask": torch.ones(count, 64).long()}
        return tokens_with(count, SOUND_TOKEN, 16) | sound

    return Entry(model, batch, {}, "transformer")


def autoformer() -> Entry:
    """Return Autoformer: the past of a series in, parameters of the distribution of its future out."""
    model = random_transformer("AutoformerForPrediction", prediction_length=8, context_length=24, num_time_features=2)

    def batch(count: int) -> Call:
        past = torch.randn(count, 31).cumsum(1)
        return {
            "past_values": past,
            "past_time_features": torch.randn(count, 31, 2),
            "past_observed_mask": torch.ones(count, 31),
            "future_values": past[:, -1:] + torch.randn(count, 8).cumsum(1),
            "future_time_features": torch.randn(count, 8, 2),
        }

    return Entry(model, batch, {}, "transformer")


def align() -> Entry:
    """Return ALIGN, with a small EfficientNet."""
    vision = {
        "image_size": 64,
        "width_coefficient": 1.0,
        "depth_coefficient": 0.4,
        "hidden_dim": 320,
        "num_block_repeats": [1, 1, 1, 1, 1, 1, 1],
    }
    return two_towers("AlignModel", SMALL, vision, 320)


def altclip() -> Entry:
    """Return AltCLIP."""
    text = SMALL | {"max_position_embeddings": 64, "project_dim": 32}
    return two_towers("AltCLIPModel", text, TOWER | {"image_size": 64, "patch_size": 16, "projection_dim": 32})


def aimv2() -> Entry:
    """Return AIMv2 with its text encoder."""
    text = SMALL | {"max_position_embeddings": 32, "eos_token_id": LAST_TOKEN}
    return two_towers("Aimv2Model", text, TOWER | {"image_size": 64, "patch_size": 16})


MODELS = (
    {f"blind/{name}": partial(of_class, name, *options) for name, options in DECODERS.items()}
    | {f"blind/{make.__name__}": make for make in (aimv2, align, altclip, apertus1p5, aria, audioflamingo3, autoformer)}
    | {f"blind/{name}": partial(of_timm, name) for name in TIMM}
)
