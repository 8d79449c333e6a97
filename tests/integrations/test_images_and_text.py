"""Decoders that read images: the model runs in Python, and its decoder is one program with the cache of the library."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import InputError, UnsupportedError
from intaglio.parts import PartlyQuantizedModel
from support.generators import END, SIZES, VOCABULARY, WIDE, generated, library
from support.lowering import sqnr

IMAGE = VOCABULARY
"""Token in whose place a part of the image is."""
PARTS_OF_IMAGE = 16
DECODER = "model.language_model"


def inputs(size: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size * length)
    words = torch.randint(2, END, (size, length), generator=draw)
    ids = torch.cat([torch.full((size, PARTS_OF_IMAGE), IMAGE), words], 1)
    pixels = torch.randn(size, 3, 64, 64, generator=draw)
    mask = torch.ones_like(ids)
    if padding:
        ids, mask = torch.cat([ids[:, :1], ids], 1), torch.cat([mask[:, :1], mask], 1)
        ids[0, 0] = mask[0, 0] = 0
        ids[1, 0], ids[1, -1] = 2, 2
        ids[1, : PARTS_OF_IMAGE + 1] = torch.tensor([2, *[IMAGE] * PARTS_OF_IMAGE])
    return {"pixel_values": pixels, "input_ids": ids, "attention_mask": mask}


def float_model() -> nn.Module:
    sizes = {**SIZES, **WIDE, "vocab_size": VOCABULARY + 1, "max_position_embeddings": 1024}
    text = library().LlamaConfig(**sizes, num_key_value_heads=2)
    vision = library().CLIPVisionConfig(**WIDE, image_size=64, patch_size=16)
    config = library().LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    torch.manual_seed(0)
    model = library().LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    return model


@functools.cache
def quantized() -> tuple[nn.Module, PartlyQuantizedModel]:
    model = float_model()
    return model, intaglio.quantize(model, [inputs(2, 8), inputs(3, 8), inputs(2, 9)], progress=False)


def inner_decoder(model: nn.Module):
    library()
    from intaglio.integrations.transformers.steps.inner_decoders import inner_decoders

    (found,) = inner_decoders(model).items()
    return found


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_the_decoder_is_one_program_and_generates_with_a_cache(caplog):
    model, int8 = quantized()
    assert isinstance(int8, PartlyQuantizedModel)
    assert "contents are equal" not in caplog.text, "images of a batch are not counted again when text is generated"
    assert int8.model.config.get_text_config(decoder=True).use_cache
    per_token = {path for path, part in int8.parts.items() if "quantize_rows(" in part.text("integer")}
    assert per_token == {DECODER, "lm_head"} < set(int8.parts)
    assert "attention(" in int8.parts[DECODER].text("integer")
    call = inputs(1, 6)
    with torch.no_grad():
        assert sqnr(int8(**call).logits, model(**call).logits) > 20
    assert torch.equal(generated(int8, call), generated(int8, call, use_cache=False))
    assert generated(int8, call, num_beams=3).shape == (1, PARTS_OF_IMAGE + 6 + 16)


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_samples_of_other_lengths_and_long_texts():
    model, int8 = quantized()
    call = inputs(2, 7, padding=1)
    given = {"pixel_values", "input_ids", "attention_mask"}
    with torch.no_grad():
        expected, found = model(**call).logits, int8(**call).logits
        assert sqnr(found[1], expected[1]) > 20
        alone = int8(**{name: call[name][1:] for name in given}).logits
        assert torch.equal(found[1:], alone), "a sample does not depend on the others"
        assert sqnr(found[0, 1:], expected[0, 1:]) > 20, "padding in front is masked"
        long = inputs(1, 600)
        assert sqnr(int8(**long).logits, model(**long).logits) > 20, "in pieces"


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_files_and_copies_generate_the_same_tokens(tmp_path):
    _, int8 = quantized()
    call = inputs(2, 6)
    expected = generated(int8, call)
    int8.save(tmp_path / "model")
    other = float_model()
    for parameter in other.parameters():
        parameter.data.zero_()
    loaded = intaglio.load_into(tmp_path / "model", other)
    assert torch.equal(generated(loaded, call), expected)
    assert loaded.fingerprint() == int8.fingerprint()
    assert torch.equal(generated(copy.deepcopy(int8), call), expected)
    part = int8.model.get_submodule(DECODER)
    assert len(pickle.dumps(part.adapted)) < 20_000, "no tensors of a call are kept"
    assert pickle.loads(pickle.dumps(part.adapted)).names == part.adapted.names
    other.config.get_text_config().use_cache = False
    with pytest.raises(
        intaglio.errors.ArtifactError, match=rf"{DECODER} takes other arguments in the file than in Llava"
    ):
        intaglio.load_into(tmp_path / "model", other)


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_the_decoder_is_compared_with_the_float_decoder():
    model, int8 = quantized()
    found = int8.compare(model, [inputs(2, 8)])
    assert set(found) == set(int8.parts)
    assert found[DECODER].samples == 2
    assert found[DECODER].results[0] > 20
    with pytest.raises(InputError, match="'output_hidden_states': it is True, which the programs"):
        int8.model.get_submodule(DECODER)(inputs_embeds=torch.randn(1, 3, 32), output_hidden_states=True)


def test_a_decoder_records_calls_without_earlier_tokens():
    path, decoder = inner_decoder(float_model())
    assert path == DECODER
    assert list(decoder.outside) == ["embed_tokens"]
    embeddings = torch.randn(2, 5, 32)
    found = decoder.recorded((), {"inputs_embeds": embeddings, "attention_mask": None, "use_cache": True})
    assert found["inputs_embeds"] is embeddings
    assert torch.equal(found["attention_mask"], torch.ones(2, 5, dtype=torch.int64))
    assert torch.equal(found["position_ids"], torch.arange(5).expand(2, 5))
    past = library().DynamicCache()
    empty = decoder.recorded((), {"inputs_embeds": embeddings, "past_key_values": past, "logits_to_keep": 1})
    assert empty.keys() == found.keys()
    past.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), 0)
    from intaglio.integrations.transformers.steps import decoder_cache

    name = decoder_cache.cache_name(decoder._parameters)
    assert decoder.recorded((), {"inputs_embeds": embeddings, name: past}) is None


def test_the_mask_for_all_tokens_is_read_among_others():
    _, decoder = inner_decoder(float_model())
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False
    masks = {"full_attention": mask, "sliding_attention": None}
    found = decoder.recorded((), {"inputs_embeds": torch.randn(2, 5, 32), "attention_mask": masks})
    assert found["attention_mask"].tolist() == [[1] * 5, [0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "it has no inputs_embeds"),
        ({"attention_mask": {"sliding_attention": None}}, "it is a dict, which may have other masks"),
        ({"visual": torch.zeros(2)}, "argument 'visual': it is a tensor of shape"),
    ],
    ids=["no embeddings", "several masks", "another tensor"],
)
def test_calls_that_no_program_takes_are_refused(given, problem):
    _, decoder = inner_decoder(float_model())
    embeddings = {"inputs_embeds": torch.randn(2, 5, 32)} if given else {}
    with pytest.raises(InputError, match=problem):
        decoder.recorded((), {**embeddings, **given})


def test_a_decoder_that_fails_in_a_step_is_no_candidate():
    from intaglio.errors import CaptureError
    from intaglio.parts import PartCandidate
    from intaglio.parts.call_recorder import recorded_calls

    model = float_model()
    module, (_, decoder) = model.get_submodule(DECODER), inner_decoder(model)
    with recorded_calls({DECODER: module}, {DECODER: decoder}) as logs, torch.no_grad():
        model(**inputs(1, 5))

    def failing(*args, **kwargs):
        raise RuntimeError("it needs token ids")

    module.forward = functools.wraps(module.forward)(failing)
    with pytest.raises(CaptureError, match="fails with the arguments of a program: RuntimeError: it needs token ids"):
        PartCandidate.of(DECODER, module, logs[DECODER], decoder)
    with recorded_calls({DECODER: module}, {DECODER: decoder}) as logs, pytest.raises(RuntimeError):
        module(inputs_embeds=torch.zeros(3))
    assert "its shape is [3], not a batch of texts" in logs[DECODER].refused


def test_caches_of_more_than_keys_and_values_are_left_to_the_model():
    from intaglio.integrations import adapted_parts_of

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "time_step_rank": 8}
    model = library().MambaForCausalLM(library().MambaConfig(**sizes, num_hidden_layers=1)).eval()
    assert adapted_parts_of(model) == {}
    assert list(adapted_parts_of(float_model())) == [DECODER]


def test_decoders_without_a_program_are_refused():
    model = float_model()
    _, decoder = inner_decoder(model)
    module = model.get_submodule(DECODER)
    calls = [decoder.recorded((), {"inputs_embeds": torch.randn(2, 5, 32)})]
    forward = module.forward

    @functools.wraps(forward)
    def with_its_own_positions(*args, **kwargs):
        shift = torch.ones(32) if kwargs.get("position_ids") is None else torch.zeros(32)
        return forward(*args, **{**kwargs, "inputs_embeds": kwargs["inputs_embeds"] + shift})

    module.forward = with_its_own_positions
    with pytest.raises(UnsupportedError, match="does not count positions from the first token"):
        decoder.float_step(module, calls)
    model.config.get_text_config().use_cache = False
    assert model.config.get_text_config(decoder=True).use_cache is False
    with pytest.raises(ValueError, match="not enough values"):
        inner_decoder(model)
