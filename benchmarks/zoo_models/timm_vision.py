"""Models of timm, from many families, with random weights."""

from __future__ import annotations

from functools import partial

from zoo_models.entry import Entry, image_entry

NAMES = {
    "cait_xxs24_224": 224,
    "coatnet_nano_rw_224": 224,
    "convmixer_768_32": 96,
    "convnextv2_atto": 96,
    "crossvit_tiny_240": 240,
    "cspdarknet53": 96,
    "dla34": 96,
    "dpn68": 96,
    "ecaresnet26t": 96,
    "edgenext_xx_small": 96,
    "efficientformer_l1": 224,
    "efficientnet_lite0": 96,
    "efficientvit_b0": 96,
    "eva02_tiny_patch14_224": 224,
    "fastvit_t8": 96,
    "fbnetc_100": 96,
    "ghostnet_100": 96,
    "gmlp_s16_224": 224,
    "hgnet_tiny": 96,
    "hrnet_w18_small": 96,
    "inception_next_tiny": 96,
    "levit_128s": 224,
    "mixer_s16_224": 224,
    "mixnet_s": 96,
    "mobilenetv4_conv_small": 96,
    "mobileone_s0": 96,
    "nf_resnet26": 96,
    "poolformer_s12": 96,
    "pvt_v2_b0": 96,
    "regnety_002": 96,
    "repvgg_a0": 96,
    "res2net50_26w_4s": 96,
    "resmlp_12_224": 224,
    "resnest14d": 96,
    "resnetv2_50": 96,
    "selecsls42": 96,
    "seresnext26d_32x4d": 96,
    "swin_tiny_patch4_window7_224": 224,
    "tf_efficientnetv2_b0": 96,
    "tiny_vit_5m_224": 224,
    "twins_svt_small": 224,
    "vgg11": 64,
    "visformer_tiny": 224,
    "vit_tiny_patch16_224": 224,
    "volo_d1_224": 224,
    "vovnet39a": 96,
    "xcit_nano_12_p16_224": 224,
}
"""Names, with height and width of the images."""
MOST_USED = {
    "convnextv2_atto",
    "efficientnet_lite0",
    "fastvit_t8",
    "mobilenetv4_conv_small",
    "regnety_002",
    "repvgg_a0",
    "swin_tiny_patch4_window7_224",
    "tf_efficientnetv2_b0",
    "vit_tiny_patch16_224",
}

FIXED = {"tf_efficientnetv2_b0"}
"""Models whose padding depends on the size of the image, which takes torch.export very long if the size is free."""


def classifier(name: str) -> Entry:
    """Return a classifier of timm by its name."""
    import timm

    size = NAMES[name]
    free = size < 200 and name not in FIXED
    return image_entry(timm.create_model(name, pretrained=False), size, free=free, most_used=name in MOST_USED)


MODELS = {f"timm/{name}": partial(classifier, name) for name in NAMES}
