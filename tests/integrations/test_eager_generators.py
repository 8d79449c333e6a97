"""Decoders of transformers in eager mode: they generate with the cache of the library."""

import pytest
import torch

from intaglio import eager
from support.generators import batch, calibration, float_model, generated
from support.recipes import UNCORRECTED
from support.slow_params import slow_params


@pytest.mark.parametrize("name", ["llama", *slow_params("gpt2", reason="each model is recorded")])
def test_a_converted_model_generates_the_same_tokens_with_and_without_a_cache(name):
    data = calibration(name)
    prepared = eager.prepare(float_model(name), (), recipe=UNCORRECTED, example_kwargs=data[0])
    with torch.no_grad():
        for one in data:
            prepared(**one)
    model, inputs = eager.convert(prepared), batch(name, 2, 7)
    found = generated(model, inputs, max_new_tokens=6, return_dict_in_generate=True)
    cache = found.get("cache", found.get("past_key_values"))
    assert cache.get_seq_length() == 12
    for way in ({"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(generated(model, inputs, max_new_tokens=6, **way), found.sequences)
    assert generated(model, inputs, max_new_tokens=6, num_beams=2).shape == (2, 13)
