"""Vision encoders for images of any sizes in one call: one program, with positions and segments as inputs."""

import copy
import functools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import intaglio
from intaglio.errors import InputError, UnsupportedError
from intaglio.parts import PartlyQuantizedModel
from support.generators import generated, library
from support.lowering import sqnr

IMAGE, START, END = 60, 61, 62
PATCH, ENCODER = 4, "model.visual"
ONE, TWO, VIDEO = [[1, 4, 6]], [[1, 4, 4], [1, 8, 4]], [[2, 4, 4]]


def inputs(grids: list[list[int]], length: int = 5) -> dict[str, torch.Tensor]:
    """Return a call with the images of these grids in front of a text, each of four patches to a token."""
    sizes, draw = torch.tensor(grids), torch.Generator().manual_seed(len(grids) + length)
    count = int(sizes.prod(1).sum())
    pictures = [torch.tensor([START, *[IMAGE] * int(size.prod() // 4), END]) for size in sizes]
    ids = torch.cat([*pictures, torch.randint(2, 60, (length,), generator=draw)])[None]
    pixels = torch.randn(count, 3 * 2 * PATCH**2, generator=draw)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": sizes,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def float_model() -> nn.Module:
    """Return a model whose encoder attends within windows in its first layer, and within images in the second."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 512, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
    vision |= {"patch_size": PATCH, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": START}
    config = library().Qwen2_5_VLConfig(text_config=text, vision_config=vision, vision_end_token_id=END, **tokens)
    model = library().Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def quantized() -> tuple[nn.Module, PartlyQuantizedModel]:
    model = float_model()
    return model, intaglio.quantize(model, [inputs(ONE), inputs(TWO), inputs(VIDEO)], progress=False)


def vision_encoder(model: nn.Module):
    library()
    from intaglio.integrations.transformers.vision.vision_encoders import vision_encoders

    (found,) = vision_encoders(model).items()
    return found


def images(grids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    call = inputs(grids)
    return call["pixel_values"], call["image_grid_thw"]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_attention_in_segments_is_that_of_each_segment(lengths):
    library()
    from intaglio.integrations.transformers.vision import attention_segments as own

    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    segments = own.Segments.of(boundaries)
    assert segments.present.sum(1).tolist() == lengths
    assert segments.tokens.flatten()[segments.places].tolist() == list(range(sum(lengths)))
    draw = torch.Generator().manual_seed(sum(lengths))
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, generator=draw) for heads in (4, 2, 2))
    with own.known_segments([boundaries], [segments]):
        found, _ = own.attend(nn.Module(), query, key, value, None, cu_seq_lens_q=boundaries, scaling=0.5)
    for first, length in zip(boundaries.tolist(), lengths, strict=False):
        own_tokens = [tensor[:, :, first : first + length] for tensor in (query, key, value)]
        expected = scaled_dot_product_attention(*own_tokens, scale=0.5, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found[:, first : first + length], expected)


def test_the_module_of_the_program_computes_what_the_encoder_does():
    model = float_model()
    path, part = vision_encoder(model)
    assert path == ENCODER
    encoder = model.get_submodule(ENCODER)
    step, arguments, example = part.float_step(encoder, [part.recorded(images(ONE), {})])
    assert example.inputs[0]["cu_window_seqlens_tokens"].shape[0] > 1
    with torch.no_grad():
        for grids in (ONE, TWO, VIDEO):
            expected, found = encoder(*images(grids)), step(*arguments(part.recorded(images(grids), {})))
            torch.testing.assert_close(found.pooler_output, expected.pooler_output)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)
    assert encoder.config._attn_implementation == "sdpa", "the float model keeps its attention"
    assert len(pickle.dumps(part)) < 20_000, "no tensors of the model are kept"


def test_calls_that_no_program_can_take_are_refused():
    _, part = vision_encoder(float_model())
    patches, grids = images(ONE)
    with pytest.raises(InputError, match="it has no grid_thw"):
        part.recorded((patches,), {})
    with pytest.raises(InputError, match="'output_hidden_states': it is True, which the programs"):
        part.recorded((patches, grids), {"output_hidden_states": True})
    part.recorded((patches, grids), {"return_dict": True, "output_hidden_states": False})
    with pytest.raises(InputError, match=r"patches has the shape \[20, 96\], and the grids have 24 patches") as caught:
        part.recorded((patches[:20], grids), {})
    assert caught.value.remedy.startswith("pass grid_thw of the same images")
    part.recorded((patches[:20], torch.tensor([[1, 2, 10]])), {})
    with pytest.raises(InputError, match="'grid_thw': no positions of patches follow from it"):
        part.recorded((patches, torch.tensor([1, 4, 6])), {})
    with pytest.raises(InputError, match="'grid_thw': no positions of patches follow from it") as caught:
        part.recorded((patches, torch.tensor([[24]])), {})
    assert caught.value.remedy.startswith("pass integers of shape [images, 3]")
    part.recorded((patches, torch.tensor([[1, 2, 12]])), {})


def test_an_encoder_that_returns_results_of_layers_has_no_program():
    model = float_model()
    path, part = vision_encoder(model)
    model.config.vision_config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match="it has other results with positions and segments"):
        part.float_step(model.get_submodule(path), [part.recorded(images(ONE), {})])


def test_an_encoder_with_other_results_has_no_program():
    model = float_model()
    path, part = vision_encoder(model)
    encoder = model.get_submodule(path)
    encoder.forward = lambda **given: type(encoder).forward(encoder, **{**given, "hidden_states": torch.ones(24, 96)})
    with pytest.raises(UnsupportedError, match="it has other results with positions and segments") as caught:
        part.float_step(encoder, [part.recorded(images(ONE), {})])
    assert caught.value.remedy.endswith("skip=['type:Qwen2_5_VisionTransformerPretrainedModel'])")


def test_an_outline_runs_code_between_submodules():
    library()
    from intaglio.integrations.transformers.vision.forward_outline import outline_of, run_forward

    outline = outline_of(Between())
    assert not [parameter for parameter in outline.parameters() if parameter.numel()]
    found: list[int] = []
    run_forward(outline, {"doubled": found.append}, {"x": torch.ones(2, 4)})
    assert found == [3]
    assert run_forward(Between(), {"doubled": lambda x: -x}, {"x": torch.ones(2, 4)}).shape == (2, 4)


def doubled(x: int) -> int:
    return 2 * x


class Between(nn.Module):
    """Calls a function after submodules, whose results it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.first = 3, nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (2 * self.first(x).to(self.first.weight.dtype) + 1)[None]
        for layer in self.layers:
            x = layer(x)
        doubled(self.number)
        return x[0]


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_the_encoder_is_one_program_for_images_of_any_sizes():
    model, int8 = quantized()
    assert set(int8.parts) == {ENCODER, "model.language_model", "lm_head"}
    assert int8.coverage.macs_text.startswith("100.0 %")
    part, encoder = int8.model.get_submodule(ENCODER), model.get_submodule(ENCODER)
    assert "attention(" in int8.parts[ENCODER].text("integer")
    with torch.no_grad():
        for grids in (ONE, TWO, VIDEO, [[1, 2, 2]], [[1, 12, 8], [3, 4, 2], [1, 2, 4]]):
            assert sqnr(part(*images(grids)).pooler_output, encoder(*images(grids)).pooler_output) > 20, grids
            assert sqnr(int8(**inputs(grids)).logits, model(**inputs(grids)).logits) > 20, grids
        patches, grids = images(TWO)
        alone = [part(patches[:16], grids[:1]), part(patches[16:], grids[1:])]
        together = part(patches, grids)
        assert torch.equal(torch.cat([one.pooler_output for one in alone]), together.pooler_output)
        assert isinstance(part(patches, grids, return_dict=False), tuple)
    with pytest.raises(InputError, match="the grids have 48 patches"):
        part(patches[:8], grids)


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_files_and_copies_have_the_same_results(tmp_path):
    model, int8 = quantized()
    call = inputs(TWO)
    expected = generated(int8, call)
    int8.save(tmp_path / "model")
    loaded = intaglio.load_into(tmp_path / "model", float_model())
    assert torch.equal(generated(loaded, call), expected)
    assert torch.equal(generated(copy.deepcopy(int8), call), expected)
    assert int8.compare(model, [inputs(ONE)])[ENCODER].results[0] > 20
