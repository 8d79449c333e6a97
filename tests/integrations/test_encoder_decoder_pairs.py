"""Encoder-decoders that are made of two models, as those that read text in images and that describe images."""

import pytest
import torch

import intaglio
from support.generators import END, PAD, SIZES, WIDE, generated, library
from support.lowering import sqnr

IMAGE = {**WIDE, "image_size": 64, "patch_size": 16}
DECODERS = {
    "trocr": ("TrOCRConfig", {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}),
}
TOKENS = {"decoder_start_token_id": 1, "pad_token_id": PAD, "eos_token_id": END}


def pair(decoder: str):
    kind, sizes = DECODERS[decoder]
    encoder = library().ViTConfig(**IMAGE)
    own = getattr(library(), kind)(**SIZES, **sizes)
    config = library().VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, own)
    torch.manual_seed(0)
    model = library().VisionEncoderDecoderModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    for entries in (model.config, model.generation_config):
        entries.update(TOKENS) if entries is model.config else entries.update(**TOKENS)
    return model


def inputs(size: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    tokens = torch.randint(2, END, (size, 7), generator=draw)
    return {"pixel_values": torch.randn(size, 3, 64, 64, generator=draw), "decoder_input_ids": tokens}


@pytest.mark.slow(reason="quantizes three modules for each decoder")
@pytest.mark.parametrize("decoder", DECODERS)
def test_pairs_have_a_program_for_each_model_and_generate_with_a_cache(decoder, tmp_path):
    model = pair(decoder)
    int8 = intaglio.quantize(model, [inputs(2), inputs(3)], progress=False)
    assert set(int8.programs) == {"encoder", "cross_attention", "decoder"}
    call = inputs(4)
    with torch.no_grad():
        assert sqnr(int8(**call).logits, model(**call).logits) > 25
    del call["decoder_input_ids"]
    found = generated(int8, call)
    assert (found == generated(model, call)).double().mean() > 0.7
    assert torch.equal(found, generated(int8, call, use_cache=False))
    int8.save(tmp_path / "model.intaglio")
    assert torch.equal(generated(intaglio.load(tmp_path / "model.intaglio"), call), found)
