"""Keys and values are appended in place: what a cache holds, and caches that share tensors with others."""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import intaglio
from intaglio.errors import InputError
from intaglio.runtime.kept_attributes import is_plain
from support.generators import END, calibration, float_model, quantized
from support.recipes import UNCORRECTED
from support.slow_params import slow_params


def tokens(count: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    return torch.randint(2, END, (batch, count), generator=torch.Generator().manual_seed(seed))


def tensors_of(cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def call(model, ids: torch.Tensor, cache=None):
    found = model(ids, past_key_values=cache)
    return found.logits, found.get("cache", found.get("past_key_values"))


@pytest.mark.parametrize(
    "kind", ["int8", *slow_params("float", reason="another program; the same memory holds values of any type")]
)
def test_steps_write_behind_the_tokens_of_the_cache_and_copy_none(kind):
    model, ids = quantized("llama", kind)[1], tokens(140)
    expected, _ = call(model, ids)
    _, cache = call(model, ids[:, :9])
    places = []
    for end in range(10, 141):
        before = [tensor.clone() for tensor in tensors_of(cache)]
        logits, cache = call(model, ids[:, end - 1 : end], cache)
        assert torch.equal(logits, expected[:, end - 1 : end])
        for old, new in zip(before, tensors_of(cache), strict=True):
            assert new.shape[2] == end
            assert torch.equal(new[:, :, : end - 1], old)
        places.append([tensor.data_ptr() for tensor in tensors_of(cache)])
    moved = sum(one != other for one, other in itertools.pairwise(places))
    assert moved == 1  # room for 76 tokens, then for more than 140


@pytest.mark.slow(reason="another model is captured and compiled")
def test_the_last_positions_of_a_model_can_be_used():
    """Its causal mask is a constant of 40 tokens, which the plan for 64 earlier tokens would not fit."""
    source, ids = float_model("gpt_neo", num_layers=1, attention_types=[[["global"], 1]]), tokens(40)
    model = intaglio.quantize(source, calibration("gpt_neo")[:1], recipe=UNCORRECTED, progress=False)
    expected, _ = call(model, ids[:, :38])
    _, cache = call(model, ids[:, :30])
    found = [call(model, ids[:, end - 1 : end], cache)[0] for end in range(31, 40)]
    assert torch.equal(torch.cat(found[:8], 1), expected[:, 30:])
    with pytest.raises(InputError, match=r"its shape is \[2, 39\]; the model takes"):
        call(model, ids[:, :1], cache)


def with_the_tensors_of(cache) -> DynamicCache:
    """A cache whose layers hold the same tensors, as a program for several texts with one beginning may make it."""
    made = DynamicCache()
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, index)
    for own, layer in zip(made.layers, cache.layers, strict=True):
        own.keys, own.values = layer.keys, layer.values
    return made


def with_the_layers_of(cache) -> DynamicCache:
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


@pytest.mark.parametrize("copied", [copy.deepcopy, with_the_tensors_of, with_the_layers_of])
@pytest.mark.parametrize("steps", [1, 3])
def test_caches_that_begin_with_the_same_tensors_do_not_overwrite_each_other(copied, steps):
    model, begin, first, second = quantized("llama", "int8")[1], tokens(6), tokens(4, 1), tokens(4, 2)
    _, cache = call(model, begin[:, :-steps])
    for step in range(steps, 0, -1):
        _, cache = call(model, begin[:, -step : begin.shape[1] - step + 1], cache)
    other = copied(cache)
    for step in range(4):
        logits, cache = call(model, first[:, step : step + 1], cache)
        other_logits, other = call(model, second[:, step : step + 1], other)
        for found, end in ((logits, first), (other_logits, second)):
            whole = torch.cat([begin, end[:, : step + 1]], 1)
            assert torch.equal(found, call(model, whole)[0][:, -1:])


def test_a_cache_that_was_cut_or_reordered_goes_on_with_its_own_tokens():
    model, ids, end = quantized("llama", "int8")[1], tokens(8), tokens(1, 3)
    _, cache = call(model, ids[:, :7])
    _, cache = call(model, ids[:, 7:], cache)
    whole = [tensor.clone() for tensor in tensors_of(cache)]
    kept = tensors_of(cache)
    cache.crop(-3)
    logits, cache = call(model, end, cache)
    assert torch.equal(logits, call(model, torch.cat([ids[:, :5], end], 1))[0][:, -1:])
    cache.reorder_cache(torch.tensor([1, 0]))
    logits, cache = call(model, end, cache)
    assert torch.equal(logits, call(model, torch.cat([ids[[1, 0], :5], end[[1, 0]], end], 1))[0][:, -1:])
    assert all(torch.equal(one, other) for one, other in zip(kept, whole, strict=True))


def test_tensors_that_are_assigned_to_a_layer_are_used():
    model, ids, end = quantized("llama", "int8")[1], tokens(8), tokens(1, 3)
    caches = []
    for begin in (ids, ids.flip(1)):
        _, cache = call(model, begin[:, :7])
        caches.append(call(model, begin[:, 7:], cache)[1])
    first, second = caches
    assert all(isinstance(layer, DynamicLayer) and layer.get_seq_length() == 8 for layer in first.layers)
    for layer, other in zip(first.layers, second.layers, strict=True):
        values = layer.values
        layer.keys = other.keys
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, values)
        layer.values = other.values
    expected, _ = call(model, end, second)
    assert torch.equal(call(model, end, first)[0], expected)
    first.reset()
    assert first.get_seq_length() == 0
    assert torch.equal(call(model, ids, first)[0], call(model, ids)[0])


@pytest.mark.slow(reason="another model is captured and compiled; a cache that was reordered goes on above")
def test_layers_in_another_order_are_read_in_that_order():
    ids = tokens(8)
    source = float_model("llama", num_hidden_layers=2)
    model = intaglio.quantize(source, calibration("llama")[:1], recipe=UNCORRECTED, progress=False)
    _, cache = call(model, ids[:, :6])
    _, cache = call(model, ids[:, 6:7], cache)
    cache.layers.reverse()
    expected = with_the_tensors_of(cache)
    assert torch.equal(call(model, ids[:, 7:], cache)[0], call(model, ids[:, 7:], expected)[0])


def test_a_cache_of_inference_mode_goes_on_outside_of_it():
    model, ids = quantized("llama", "int8")[1], tokens(8)
    with torch.inference_mode():
        _, cache = call(model, ids[:, :5])
        _, cache = call(model, ids[:, 5:6], cache)
    for end in (7, 8):
        logits, cache = call(model, ids[:, end - 1 : end], cache)
        assert torch.equal(logits, call(model, ids[:, :end])[0][:, -1:])


def test_layers_that_read_the_keys_and_values_of_others_are_not_in_the_cache():
    from intaglio.integrations.transformers.steps.cache_memory import layers_of
    from intaglio.integrations.transformers.steps.decoder_cache import unsupported_layer

    config = float_model("gemma4").config
    cache = DynamicCache(config=config)
    assert len(cache.layers) == 4
    assert layers_of(cache) == cache.layers[:2]
    assert unsupported_layer(config) is None
    cache.layers.reverse()
    assert layers_of(cache) == cache.layers
    assert is_plain(config)  # although it has no single size of heads
