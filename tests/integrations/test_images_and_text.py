"""Decoders that read images: they are quantized in parts, and generate with the cache of the library."""

import pytest
import torch

import intaglio
from intaglio.parts import PartlyQuantizedModel
from support.generators import END, SIZES, VOCABULARY, WIDE, generated, library
from support.lowering import sqnr

IMAGE = VOCABULARY
"""Token in whose place a part of the image is."""
PARTS_OF_IMAGE = 16


def inputs(size: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size * length)
    words = torch.randint(2, END, (size, length), generator=draw)
    ids = torch.cat([torch.full((size, PARTS_OF_IMAGE), IMAGE), words], 1)
    pixels = torch.randn(size, 3, 64, 64, generator=draw)
    return {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_a_decoder_with_images_generates_with_a_cache(caplog):
    sizes = {**SIZES, **WIDE, "vocab_size": VOCABULARY + 1}
    torch.manual_seed(0)
    kind = library().LlavaForConditionalGeneration
    text = library().LlamaConfig(**sizes, num_key_value_heads=2)
    model = kind(
        library().LlavaConfig(
            text_config=text,
            vision_config=library().CLIPVisionConfig(**WIDE, image_size=64, patch_size=16),
            image_token_index=IMAGE,
        )
    ).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    int8 = intaglio.quantize(model, [inputs(2, 8), inputs(3, 8), inputs(2, 9)], progress=False)
    assert isinstance(int8, PartlyQuantizedModel)
    assert "contents are equal" not in caplog.text, "images of a batch are not counted again when text is generated"
    assert int8.model.config.get_text_config(decoder=True).use_cache
    per_token = {path for path, part in int8.parts.items() if "quantize_rows(" in part.text("integer")}
    text_parts = {path for path in int8.parts if path.startswith(("model.language_model.", "lm_head"))}
    assert per_token == text_parts < set(int8.parts)
    call = inputs(1, 6)
    with torch.no_grad():
        assert sqnr(int8(**call).logits, model(**call).logits) > 20
    assert torch.equal(generated(int8, call), generated(int8, call, use_cache=False))
