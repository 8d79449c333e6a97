"""Masks in which tokens of an image attend to the later tokens of the image too, and results of a vision model that are
added to those of the first layers of a decoder.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio.errors import InputError
from support.generators import END, SIZES, VOCABULARY, WIDE, generated, library
from support.lowering import sqnr

IMAGE, START, STOP = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2
TEXT = {**SIZES, **WIDE, "vocab_size": VOCABULARY + 3, "num_key_value_heads": 2, "head_dim": 8}
VISION = {**WIDE, "image_size": 32, "patch_size": 16}
DECODER = "model.language_model"


def gemma(size: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size * length)
    words = torch.randint(2, END, (size, length), generator=draw)
    ids = torch.cat([words[:, :2], torch.full((size, 4), IMAGE), words[:, 2:]], 1)
    pixels = torch.randn(size, 3, 32, 32, generator=draw)
    types = (ids == IMAGE).long()
    return {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": types}


def qwen(size: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size * length)
    words = torch.randint(2, END, (size, length), generator=draw)
    image = torch.tensor([START, *[IMAGE] * 4, STOP]).expand(size, 6)
    ids = torch.cat([words[:, :2], image, words[:, 2:]], 1)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    patches = torch.randn(size * 16, 3 * 2 * 4 * 4, generator=draw)
    return {**found, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * size)}


def gemma_model() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    text = {**TEXT, "num_hidden_layers": 2, "sliding_window": 6, "layer_types": kinds}
    config = library().Gemma3Config(
        text_config=library().Gemma3TextConfig(**text),
        vision_config=library().SiglipVisionConfig(**VISION),
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )
    return library().Gemma3ForConditionalGeneration(config)


def qwen_model() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = library().Qwen3VLConfig(
        text_config={**TEXT, "num_hidden_layers": 2, "rope_parameters": rotary},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=END,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    return library().Qwen3VLForConditionalGeneration(config)


MODELS = {"gemma3": (gemma_model, gemma), "qwen3_vl": (qwen_model, qwen)}


@functools.cache
def quantized(name: str):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    return model, intaglio.quantize(model, [inputs(2, 8), inputs(3, 8), inputs(2, 9)], progress=False)


@pytest.mark.slow(reason="quantizes the parts of a model")
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_with_further_inputs_is_one_program(name):
    (model, int8), inputs = quantized(name), MODELS[name][1]
    assert DECODER in int8.parts
    for size, length in ((1, 7), (2, 12)):
        call = inputs(size, length)
        with torch.no_grad():
            assert sqnr(int8(**call).logits, model(**call).logits) > 25
        assert torch.equal(generated(int8, call), generated(int8, call, use_cache=False))


@pytest.mark.slow(reason="quantizes the parts of a model")
@pytest.mark.parametrize("name", MODELS)
def test_text_without_images_and_images_in_long_texts(name, monkeypatch):
    (model, int8), inputs = quantized(name), MODELS[name][1]
    words = {"input_ids": torch.randint(2, END, (2, 9), generator=torch.Generator().manual_seed(5))}
    with torch.no_grad():
        assert sqnr(int8(**words).logits, model(**words).logits) > 25
        long = inputs(1, 600)
        if name == "gemma3":  # the block is in the middle of the text
            rolled = ("input_ids", "token_type_ids")
            long |= {one: long[one].roll(298, 1) for one in rolled}
        found = int8(**long).logits
        assert sqnr(found, model(**long).logits) > 25
        from intaglio.integrations.transformers.steps import text_pieces

        monkeypatch.setattr(text_pieces, "PIECE", 10_000)
        assert torch.equal(int8(**long).logits, found), "pieces have the bits of the whole text"


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_masks_of_other_kinds_are_refused():
    _, int8 = quantized("gemma3")
    part = int8.model.get_submodule(DECODER)
    embeddings, mask = torch.randn(1, 5, 32), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    part(inputs_embeds=embeddings, attention_mask={"full_attention": mask, "sliding_attention": None})
    mask[0, 0, 3, 1] = False
    with pytest.raises(InputError, match="it is not the mask of a padded batch with blocks"):
        part(inputs_embeds=embeddings, attention_mask={"full_attention": mask, "sliding_attention": None})


def test_prompts_need_the_types_of_tokens_where_all_attend_to_each_other():
    text = library().GemmaConfig(**TEXT).to_dict()
    vision = library().SiglipVisionConfig(**VISION).to_dict()
    sizes = {"image_token_index": IMAGE, "projection_dim": 32}
    config = library().PaliGemmaConfig(text_config=text, vision_config=vision, **sizes)
    model = library().PaliGemmaForConditionalGeneration(config).eval()
    from intaglio.integrations.transformers.steps.inner_decoders import inner_decoders

    decoder, recorded = inner_decoders(model)[DECODER], []
    model.get_submodule(DECODER).register_forward_pre_hook(
        lambda _, args, kwargs: recorded.append(decoder.recorded(args, kwargs)), with_kwargs=True
    )
    call = gemma(2, 8)
    types = torch.where(torch.arange(12) < 9, 0, 1).expand(2, 12)
    del call["token_type_ids"]
    with torch.no_grad():
        with pytest.raises(InputError, match="without a mask of blocks all tokens attend to each other"):
            model(**call)
        model(**call, token_type_ids=types)
    (found,) = recorded
    assert torch.equal(found["blocks"] != -1, types == 0)


def test_embeddings_of_layers_are_inputs_of_the_step():
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY + 3}
    config = library().Gemma4Config(text_config={**TEXT, **kinds, **layers}, vision_config=None, audio_config=None)
    model = library().Gemma4ForConditionalGeneration(config).eval()
    from intaglio.integrations.transformers.steps.inner_decoders import inner_decoders

    decoder, recorded, module = inner_decoders(model)[DECODER], [], model.get_submodule(DECODER)
    assert list(decoder.outside) == ["embed_tokens", "embed_tokens_per_layer"]
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: recorded.append(decoder.recorded(args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=torch.randint(2, END, (2, 9)))
    hook.remove()
    assert recorded[0]["per_layer_inputs"].shape == (2, 9, 2, 8)
    step, call, example = decoder.float_step(module, recorded)
    with torch.no_grad():
        hidden, keys_and_values = step(*call(recorded[0]))
    assert hidden.shape == (2, 9, 32)
    assert len(keys_and_values) == 2
    assert example.inputs[0]["per_layer_inputs"].shape[1] == example.inputs[0]["tokens"].shape[1]


@given(
    length=st.integers(8, 40),
    starts=st.lists(st.integers(0, 39), max_size=3),
    size=st.integers(1, 9),
    piece=st.integers(3, 9),
)
def test_pieces_of_a_text_end_where_no_block_does(length, starts, size, piece):
    library()
    from intaglio.integrations.transformers.steps import text_pieces

    blocks = torch.full((2, length), -1)
    for number, start in enumerate(starts):
        blocks[number % 2, start : start + size] = number
    inputs = {"tokens": torch.arange(length).expand(2, -1), "mask": torch.ones(2, length), "blocks": blocks}
    inputs["past_mask"] = torch.ones(2, 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text_pieces, "PIECE", piece)
        found = list(text_pieces.pieces(inputs))
    assert torch.equal(torch.cat([one["tokens"] for one, _ in found], 1), inputs["tokens"])
    assert torch.equal(torch.cat([one["blocks"] for one, _ in found], 1), blocks)
    for before, after in itertools.pairwise(one["blocks"] for one, _ in found):
        assert not ((before[:, -1] == after[:, 0]) & (after[:, 0] != -1)).any()
    assert max(one["tokens"].shape[1] for one, _ in found) < piece + 3 * size


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    is_image=st.lists(st.booleans(), min_size=6, max_size=6),
    padding=st.integers(0, 3),
    earlier=st.integers(0, 3),
    as_float=st.booleans(),
)
def test_padding_and_blocks_are_found_in_a_mask(lengths, is_image, padding, earlier, as_float):
    library()
    from intaglio.integrations.transformers.steps.token_blocks import NO_BLOCK, padding_and_blocks

    new, total = sum(lengths) + 1, sum(lengths) + 1 + earlier
    blocks = torch.full((new,), NO_BLOCK)
    place = 0
    for index, length in enumerate(lengths):
        if is_image[index]:
            blocks[place : place + length] = index
        place += length
    is_token = torch.ones(total, dtype=torch.bool)
    is_token[: min(padding, earlier)] = False
    whole = torch.cat([torch.full((earlier,), NO_BLOCK), blocks])
    allowed = torch.ones(new, total, dtype=torch.bool).tril(earlier)
    allowed |= (blocks[:, None] == whole) & (blocks[:, None] != NO_BLOCK)
    allowed &= is_token
    mask = allowed[None, None]
    found, found_blocks = padding_and_blocks((~mask).float() * -1e9 if as_float else mask, total)
    assert torch.equal(found[0].bool(), is_token)
    same = (found_blocks[0][:, None] == found_blocks[0]) & (found_blocks[0] != NO_BLOCK)
    expected = (blocks[:, None] == blocks) & (blocks != NO_BLOCK)
    alone = expected.sum(1) == 1  # whether a block of one token is one makes no difference
    assert torch.equal(same & ~alone[:, None], expected & ~alone[:, None])
