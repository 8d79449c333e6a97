"""Vision and multimodal models of transformers, small, with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from zoo_models.entry import Entry, draw_statistics, random_transformer, settle_statistics

VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 64,
    "patch_size": 16,
}
STAGES = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
VISION: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("BeitForImageClassification", VIT, 64),
    "convnext": ("ConvNextForImageClassification", STAGES, 64),
    "convnextv2": ("ConvNextV2ForImageClassification", STAGES, 64),
    "cvt": ("CvtForImageClassification", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, 64),
    "deit": ("DeiTForImageClassification", VIT, 64),
    "depth_anything": ("DepthAnythingForDepthEstimation", {}, 56),
    "dinov2": ("Dinov2ForImageClassification", VIT | {"mlp_ratio": 2, "patch_size": 14, "image_size": 56}, 56),
    "mobilevit": ("MobileViTForImageClassification", {"image_size": 64}, 64),
    "mobilevitv2": ("MobileViTV2ForImageClassification", {"image_size": 64}, 64),
    "poolformer": ("PoolFormerForImageClassification", STAGES | {"hidden_sizes": [16, 32, 64, 64]}, 64),
    "pvt_v2": ("PvtV2ForImageClassification", {"depths": [1, 1, 1, 1], "image_size": 64}, 64),
    "regnet": ("RegNetForImageClassification", STAGES | {"groups_width": 16}, 64),
    "resnet": ("ResNetForImageClassification", STAGES | {"embedding_size": 16}, 64),
    "segformer": ("SegformerForSemanticSegmentation", {"depths": [1, 1, 1, 1]}, 64),
    "swin": (
        "SwinForImageClassification",
        {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "image_size": 56},
        56,
    ),
    "vit": ("ViTForImageClassification", VIT, 64),
    "vit_mae": ("ViTMAEModel", VIT, 64),
    "yolos": ("YolosForObjectDetection", VIT | {"image_size": [64, 64], "num_detection_tokens": 10}, 64),
}
MOST_USED = {"clip", "convnext", "deit", "dinov2", "segformer", "siglip", "vit"}


def vision(name: str, kind: str, options: dict[str, Any], size: int) -> Entry:
    """Return the entry of a vision model of transformers with a small configuration."""
    if name == "depth_anything":
        backbone = transformers.Dinov2Config(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=56,
            patch_size=14,
            out_indices=[1, 2, 3, 4],
            apply_layernorm=True,
            reshape_hidden_states=False,
        )
        options = {
            "backbone_config": backbone,
            "reassemble_hidden_size": 64,
            "neck_hidden_sizes": [16, 32, 32, 32],
            "fusion_hidden_size": 16,
            "patch_size": 14,
        }
    model = random_transformer(kind, **options)
    draw_statistics(model)
    settle_statistics(model, torch.randn(4, 3, size, size))

    def batch(count: int) -> dict[str, torch.Tensor]:
        call = {"pixel_values": torch.randn(count, 3, size, size)}
        if name == "vit_mae":  # without it, the model draws the patches that it masks
            call["noise"] = torch.rand(count, (size // options["patch_size"]) ** 2)
        return call

    return Entry(model, batch, {}, None, name in MOST_USED)


def clip(kind: str) -> Entry:
    """Return CLIP or SigLIP: images and texts in one space."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = small | {"vocab_size": 500, "max_position_embeddings": 32, "eos_token_id": 499}
    picture = small | {"image_size": 64, "patch_size": 16}
    model = random_transformer(f"{kind}Model", text_config=text, vision_config=picture)

    def batch(count: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 498, (count, 16))
        ids[:, -1] = 499
        call = {"input_ids": ids, "pixel_values": torch.randn(count, 3, 64, 64)}
        return call | ({"attention_mask": torch.ones_like(ids)} if kind == "CLIP" else {})

    return Entry(model, batch, {}, "transformer", kind.lower() in MOST_USED)


def detr() -> Entry:
    """Return DETR with a small backbone."""
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    model = random_transformer(
        "DetrForObjectDetection",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=10,
    )
    draw_statistics(model)
    return Entry(model, lambda count: {"pixel_values": torch.randn(count, 3, 96, 96)})


def sam() -> Entry:
    """Return the image encoder of SAM."""
    model = random_transformer(
        "SamVisionModel",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=128,
        mlp_dim=128,
        global_attn_indexes=[1],
    )
    return Entry(model, lambda count: {"pixel_values": torch.randn(count, 3, 128, 128)})


MODELS = {f"hf/{name}": partial(vision, name, *options) for name, options in VISION.items()} | {
    "clip": partial(clip, "CLIP"),
    "siglip": partial(clip, "Siglip"),
    "detr": detr,
    "sam_vision": sam,
}
