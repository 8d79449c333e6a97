"""Layers with a sliding window hold the last keys and values only, and compute the same as with all of them."""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import intaglio
from intaglio.errors import InputError
from support.generators import END, MODELS, batch, calibration, float_model, generated, quantized
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

WINDOW = 6
KINDS = [
    ("mistral", "float"),
    *slow_params(("gemma3", "float"), ("gemma3", "int8"), reason="a larger model is captured and compiled"),
]


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, END, (2, count), generator=torch.Generator().manual_seed(seed))


def call(model, ids: torch.Tensor, cache=None, **settings):
    found = model(ids, past_key_values=cache, **settings)
    return found.logits, found.get("cache", found.get("past_key_values"))


def slides(name: str, index: int) -> bool:
    kinds = MODELS[name][1].get("layer_types")
    return kinds is None or kinds[index] == "sliding_attention"


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_layers_hold_the_tokens_of_their_window(name, kind):
    model, ids = quantized(name, kind)[1], tokens(40)
    expected, _ = call(model, ids)
    _, cache = call(model, ids[:, :3])
    for end in range(4, 41):
        logits, cache = call(model, ids[:, end - 1 : end], cache)
        assert torch.equal(logits, expected[:, end - 1 : end])
        assert cache.get_seq_length() == end
        for index, layer in enumerate(cache.layers):
            held = min(end, WINDOW - 1) if slides(name, index) else end
            assert layer.keys.shape[2] == layer.values.shape[2] == held
            assert layer.get_seq_length() == end


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("sizes", [(9, 9, 9), (5, 1, 1, 7, 1, 12), (20, 1, 6)])
def test_texts_in_pieces_give_the_same_logits(name, kind, sizes):
    model, ids = quantized(name, kind)[1], tokens(27)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected, _ = call(model, ids, attention_mask=mask)
    cache = None
    for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        logits, cache = call(model, ids[:, begin:end], cache, attention_mask=mask[:, :end])
        assert torch.equal(logits[1], expected[1, begin:end])
        assert torch.equal(logits[0, max(0, 4 - begin) :], expected[0, max(4, begin) : end])


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}],
    ids=["greedy", "beams", "lookup", "sampling"],
)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_generated_tokens_are_those_with_all_tokens_in_the_cache(name, kind, settings):
    model = quantized(name, kind)[1]
    inputs = batch(name, size=1 if "prompt_lookup_num_tokens" in settings else 3, length=9, padding=2)
    if "prompt_lookup_num_tokens" in settings:
        inputs = {"input_ids": tokens(4)[:1].repeat(1, 3)}
    whole = generated(model, {**inputs, "past_key_values": DynamicCache()}, **settings)
    assert torch.equal(generated(model, inputs, **settings), whole)


@pytest.mark.slow(reason="a larger model is captured and compiled")
def test_a_plain_cache_keeps_all_tokens():
    model, ids = quantized("gemma3", "int8")[1], tokens(20)
    cache = DynamicCache()
    for end in range(1, 16):
        logits, cache = call(model, ids[:, end - 1 : end], cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [15, 15, 15]
    cache.crop(-5)
    expected, _ = call(model, torch.cat([ids[:, :10], ids[:, 15:]], 1))
    for end in range(16, 21):
        logits, cache = call(model, ids[:, end - 1 : end], cache)
        assert torch.equal(logits[:, 0], expected[:, end - 6])


@pytest.mark.slow(reason="a larger model is captured and compiled")
def test_memory_of_a_window_does_not_grow():
    model, ids = quantized("gemma3", "int8")[1], tokens(400)
    _, cache = call(model, ids[:, :1])
    sizes = set()
    for end in range(2, 401):
        _, cache = call(model, ids[:, end - 1 : end], cache)
        sizes.add(cache.layers[0].memory.blocks[0].memory.shape[3])
    assert max(sizes) < 80


@pytest.mark.slow(reason="a larger model is captured and compiled")
@pytest.mark.parametrize("length", [4, 15])
def test_copies_and_reordered_caches_go_on_with_their_own_tokens(length):
    model, ids, end = quantized("gemma3", "int8")[1], tokens(length), tokens(3, 1)
    _, cache = call(model, ids[:, :-1])
    _, cache = call(model, ids[:, -1:], cache)
    other, layers = copy.deepcopy(cache), copy.copy(cache)
    layers.layers = [copy.copy(layer) for layer in cache.layers]
    other.reorder_cache(torch.tensor([1, 0]))
    for step in range(3):
        for found, texts in ((cache, ids), (other, ids[[1, 0]]), (layers, ids)):
            logits, _ = call(model, end[:, step : step + 1], found)
            assert torch.equal(logits, call(model, torch.cat([texts, end[:, : step + 1]], 1))[0][:, -1:])
    assert [layer.get_seq_length() for layer in other.layers] == [length + 3] * 3


@pytest.mark.slow(reason="a larger model is captured and compiled")
def test_a_cache_can_be_cut_before_the_window_is_full():
    model, ids, end = quantized("gemma3", "int8")[1], tokens(5), tokens(1, 1)
    _, cache = call(model, ids[:, :4])
    _, cache = call(model, ids[:, 4:], cache)
    cache.crop(-2)
    assert torch.equal(call(model, end, cache)[0], call(model, torch.cat([ids[:, :3], end], 1))[0][:, -1:])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(call(model, ids, cache)[0], call(model, ids)[0])


@pytest.mark.slow(reason="a larger model is captured and compiled")
def test_a_cache_with_shorter_windows_is_refused():
    model, ids = quantized("gemma3", "int8")[1], tokens(12)
    cache = DynamicCache(config=float_model("gemma3", sliding_window=4).config)
    _, cache = call(model, ids[:, :8], cache)
    assert isinstance(cache.layers[0], DynamicSlidingWindowLayer)
    with pytest.raises(InputError, match=r"layer 0 of the cache keeps 3 tokens(?s:.*)leave the cache"):
        call(model, ids[:, 8:], cache)


@pytest.mark.slow(reason="a larger model is captured and compiled")
def test_saved_models_have_windows_too(tmp_path):
    model, ids = quantized("gemma3", "int8")[1], tokens(20)
    model.save(tmp_path / "model.intaglio")
    same = intaglio.load(tmp_path / "model.intaglio")
    _, cache = call(same, ids[:, :15])
    assert [layer.keys.shape[2] for layer in cache.layers] == [5, 15, 5]
    assert torch.equal(call(same, ids[:, 15:], cache)[0], call(model, ids)[0][:, 15:])


@pytest.mark.slow(reason="compiles a decoder without windows")
def test_programs_of_earlier_releases_read_all_tokens(monkeypatch):
    """These have one number of earlier tokens for all layers."""
    layers = ["sliding_attention", "full_attention"]
    source = float_model("gemma3", num_hidden_layers=2, layer_types=layers)
    from intaglio.integrations.transformers.steps import cached_steps, decoder_cache

    with monkeypatch.context() as context:
        for module in (cached_steps, decoder_cache):
            context.setattr(module, "windows_of", lambda config: {})
        model = intaglio.quantize(source, calibration("gemma3")[:1], recipe=UNCORRECTED, progress=False)
    ids, cache = tokens(20), DynamicCache(config=model.config)
    logits = [call(model, ids[:, end - 1 : end], cache)[0] for end in range(1, 21)]
    assert [layer.keys.shape[2] for layer in cache.layers] == [20, 20]
    assert torch.equal(torch.cat(logits, 1), call(model, ids)[0])
