"""Padding of the encoder's input in models whose encoders shorten their padding masks."""

import pytest
import torch

import intaglio
from intaglio.errors import InputError
from intaglio.parts import PartlyQuantizedModel
from support.generators import END, PAIR, SIZES, batch, calibration, float_model, generated, library, quantized
from support.lowering import sqnr
from support.recipes import UNCORRECTED

SPEECH = {**SIZES, **PAIR, "input_feat_per_channel": 16, "conv_channels": 32, "max_target_positions": 40}
HEARING = {"hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
HEARING |= {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "decoder_start_token_id": 2}
FRAMES = 40


def reads_padding(model, call) -> bool:
    library()  # before the modules that import it
    from intaglio.integrations.transformers.steps.float_programs import reads_source_padding

    return reads_source_padding(model, call)


def speech_model():
    """Its decoder reads the padding mask of the frames, shortened as two convolutions with stride 2 shorten these."""
    torch.manual_seed(0)
    kind = library().Speech2TextForConditionalGeneration
    model = kind(kind.config_class(**SPEECH, max_source_positions=100)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    return model


def speech(seed: int, visible: int) -> dict[str, torch.Tensor]:
    """Two samples, of which the second has as many frames, and tokens of the decoder."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, FRAMES, dtype=torch.int64)
    mask[1, visible:] = 0
    features = torch.randn(2, FRAMES, 16, generator=draw)
    tokens = torch.randint(2, END, (2, 7), generator=draw)
    return {"input_features": features, "attention_mask": mask, "decoder_input_ids": tokens}


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_models_whose_decoder_reads_padding_are_quantized_in_parts_if_there_is_some():
    model = speech_model()
    int8_model = intaglio.quantize(model, [speech(seed, 20) for seed in range(3)], progress=False)
    assert isinstance(int8_model, PartlyQuantizedModel)
    call = speech(9, 16)
    with torch.no_grad():
        expected, found = model(**call).logits, int8_model(**call).logits
        unpadded = model(**{**call, "attention_mask": torch.ones(2, FRAMES, dtype=torch.int64)}).logits
    assert sqnr(unpadded[1], expected[1]) < 30
    assert all(sqnr(found[sample], expected[sample]) > 35 for sample in (0, 1))
    del call["decoder_input_ids"]
    assert torch.equal(generated(int8_model, call), generated(model, call))


@pytest.mark.slow(reason="quantizes a model, and loads it again")
def test_models_quantized_without_padding_refuse_it(tmp_path):
    int8_model = intaglio.quantize(
        speech_model(), [speech(seed, FRAMES) for seed in range(2)], recipe=UNCORRECTED, progress=False
    )
    int8_model.save(tmp_path / "model.intaglio")
    for found in (int8_model, intaglio.load(tmp_path / "model.intaglio")):
        call = speech(9, FRAMES)
        expected = found(**call).logits
        del call["attention_mask"]
        assert torch.equal(found(**call).logits, expected)
        with pytest.raises(InputError, match="hides part of the encoder's input") as error:
            found(**speech(9, 16))
        assert error.value.remedy == "quantize the model with batches of which one has padding"


@pytest.mark.slow(reason="quantizes a model")
def test_whisper_reads_no_padding():
    model, int8_model, _ = quantized("whisper")
    call = calibration("whisper")[0]
    assert not reads_padding(model, call)
    mask = torch.ones(4, 40, dtype=torch.int64)
    mask[0, 20:] = 0
    inputs = batch("whisper")
    assert torch.equal(generated(int8_model, {**inputs, "attention_mask": mask}), generated(int8_model, inputs))


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_programs_have_the_padding_of_tokens(name):
    assert not reads_padding(float_model(name), batch(name))


@pytest.mark.slow(reason="quantizes a model")
def test_moonshine_whose_encoder_returns_a_mask_generates():
    torch.manual_seed(0)
    kind = library().MoonshineForConditionalGeneration
    model = kind(kind.config_class(**SIZES, **HEARING)).eval()
    data = [
        {"input_values": torch.randn(2, 4000), "decoder_input_ids": torch.randint(2, END, (2, 7))} for _ in range(3)
    ]
    int8_model = intaglio.quantize(model, data, progress=False)
    assert not int8_model.listed.takes_padding
    for size, length in ((2, 4000), (1, 5000)):
        inputs = {"input_values": torch.randn(size, length)}
        assert torch.equal(generated(int8_model, inputs), generated(model, inputs))
