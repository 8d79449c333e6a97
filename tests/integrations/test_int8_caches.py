"""Keys and values that stay int8 in the caches of the library: their data type, and the bits and tokens of steps."""

import pytest
import torch

import intaglio
from intaglio import Recipe
from intaglio.errors import InputError
from intaglio.ops import op_def
from intaglio.plan import plan_graph
from support.generators import END, MODELS, batch, calibration, float_model, generated, library, quantized
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

BEAMS, STATIC, SAMPLED = {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True, "top_k": 10}
WAYS = [{}, BEAMS, SAMPLED, STATIC, {"use_cache": False}]
SLOW = [(name, way) for name in MODELS if name != "llama" for way in ({}, BEAMS)]
SLOW += [("gpt2", STATIC), ("bart", STATIC)]


def parts_of(found) -> tuple:
    """The caches of self-attention and of cross-attention in a result of `generate` or of a call."""
    cache = found.get("cache", found.get("past_key_values"))
    return (cache.self_attention_cache, cache.cross_attention_cache) if hasattr(cache, "is_updated") else (cache,)


def layers_of(found) -> list:
    return [layer for part in parts_of(found) for layer in part.layers]


@pytest.mark.parametrize(
    ("name", "way"),
    [*[("llama", way) for way in WAYS], *slow_params(*SLOW, reason="each model is captured and compiled")],
)
def test_tokens_are_those_of_the_interpreter_and_of_a_float_cache(name, way):
    inputs = batch(name, 3, 9, padding=3, seed=5)
    _, int8_model, interpreted = quantized(name, "int8")
    found = generated(int8_model, inputs, **way)
    assert torch.equal(found, generated(interpreted, inputs, **way))
    assert torch.equal(found, generated(quantized(name)[1], inputs, **way))


@pytest.mark.parametrize(
    ("name", "way"),
    [("llama", {}), ("llama", STATIC), *slow_params(("t5", {}), ("bart", STATIC), reason="each model is compiled")],
)
def test_the_cache_has_one_byte_for_each_value(name, way):
    inputs = batch(name, 3, 9, padding=3, seed=5)
    sizes = []
    for kind, dtype in (("float", torch.float32), ("int8", torch.uint8)):
        found = generated(quantized(name, kind)[1], inputs, return_dict_in_generate=True, **way)
        tensors = [tensor for layer in layers_of(found) for tensor in (layer.keys, layer.values)]
        assert {tensor.dtype for tensor in tensors} == {dtype}
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize("name", ["bart", *slow_params("t5", "whisper", reason="each model is compiled")])
def test_keys_and_values_that_are_computed_once_are_int8_by_default(name):
    assert Recipe().with_decoder_defaults([]).default.cache == "auto"
    inputs = batch(name, 3, 9, padding=3, seed=5)
    _, int8_model, interpreted = quantized(name, "auto")
    found = generated(int8_model, inputs, return_dict_in_generate=True)
    own, cross = (
        {tensor.dtype for layer in part.layers for tensor in (layer.keys, layer.values)} for part in parts_of(found)
    )
    assert (own, cross) == ({torch.float32}, {torch.uint8})
    for way in ({}, BEAMS, {"use_cache": False}):
        assert torch.equal(generated(int8_model, inputs, **way), generated(interpreted, inputs, **way))


def test_attention_reads_them_where_they_are():
    program = quantized("bart", "auto")[1].programs["decoder"]
    moved = {op.inputs[0] for step in plan_graph(program.graph).partitions for op in step.ops if op_def(op).moves_data}
    held = {external.value for external in program.artifact.program.externals if external.value.startswith("cross_")}
    assert len(held) == 2
    assert not moved & held


@pytest.mark.slow(reason="each model is captured and compiled")
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
@pytest.mark.parametrize("way", [{}, BEAMS, STATIC])
def test_tokens_of_the_default_are_those_of_a_float_cache(name, way):
    inputs = batch(name, 3, 9, padding=3, seed=5)
    assert torch.equal(
        generated(quantized(name, "auto")[1], inputs, **way), generated(quantized(name)[1], inputs, **way)
    )


@pytest.mark.parametrize("name", ["bart", *slow_params("t5", reason="each model is compiled")])
def test_steps_of_encoder_decoders_append_in_place(name, monkeypatch):
    _, int8_model, _ = quantized(name, "auto")
    from intaglio.integrations.transformers.steps import decoder_runs

    ids = torch.randint(2, END, (2, 24), generator=torch.Generator().manual_seed(1))
    given = {"encoder_outputs": int8_model.get_encoder()(**batch(name, 2, 9))}
    full = int8_model(decoder_input_ids=ids, **given).logits
    past = int8_model(decoder_input_ids=ids[:, :2], **given)
    monkeypatch.delattr(decoder_runs, "run_step")  # it copies the new keys and values
    places = set()
    for end in range(3, 25):
        past = int8_model(decoder_input_ids=ids[:, end - 1 : end], past_key_values=past.past_key_values, **given)
        assert torch.equal(past.logits, full[:, end - 1 : end])
        places.add(parts_of(past)[0].layers[0].keys.data_ptr())
    assert len(places) == 1


def test_cached_steps_give_the_bits_of_a_full_forward():
    _, int8_model, _ = quantized("llama", "int8")
    ids = torch.randint(2, END, (3, 20), generator=torch.Generator().manual_seed(1))
    full = int8_model(ids).logits
    assert torch.equal(full, quantized("llama")[1](ids).logits)
    past = int8_model(ids[:, :4])
    assert torch.equal(past.logits, full[:, :4])
    for end in range(5, 21):
        before = [layer.keys for layer in layers_of(past)]
        past = int8_model(ids[:, end - 1 : end], past_key_values=past.past_key_values)
        assert torch.equal(past.logits, full[:, end - 1 : end])
        for layer, keys in zip(layers_of(past), before, strict=True):
            assert torch.equal(layer.keys[:, :, : end - 1], keys)


def test_stored_values_are_the_float_values_in_steps_of_the_programs_scale():
    ids = batch("llama")["input_ids"]
    int8_model = quantized("llama", "int8")[1]
    kept, wanted = (layers_of(model(ids))[0] for model in (int8_model, quantized("llama")[1]))
    types = [entry.type for entry in int8_model.programs["decoder"].signature.inputs[-2:]]
    for stored, real, kind in zip((kept.keys, kept.values), (wanted.keys, wanted.values), types, strict=True):
        q = kind.qparams
        found = torch.ops.quantized_decomposed.quantize_per_tensor(real, q.step, q.zero, q.qmin, q.qmax, torch.uint8)
        assert torch.equal(stored, found)


def test_a_cache_of_another_data_type_is_an_error():
    int8_model, other = quantized("llama", "int8")[1], quantized("llama")[1]
    ids = batch("llama")["input_ids"]
    past = other(ids).past_key_values
    with pytest.raises(InputError, match=r"(?s)layer 0 holds torch.float32.*begin with an empty cache"):
        int8_model(ids[:, :1], past_key_values=past)
    int8_model(ids[:, :1], past_key_values=library().DynamicCache())


@pytest.mark.slow(reason="each model is captured and compiled")
def test_quantize_takes_the_setting_for_single_layers_and_files_keep_it(tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    model = float_model("llama", num_hidden_layers=2)
    int8_model = intaglio.quantize(model, calibration("llama"), recipe={"model.layers.1.*": {"cache": "int8"}})
    inputs = batch("llama", 2, 7)
    first, second = layers_of(int8_model(**inputs))
    assert (first.keys.dtype, second.keys.dtype, second.values.dtype) == (torch.float32, torch.uint8, torch.uint8)
    int8_model.save_pretrained(tmp_path)
    assert torch.equal(generated(from_pretrained(tmp_path), inputs, **BEAMS), generated(int8_model, inputs, **BEAMS))


@pytest.mark.slow(reason="each model is captured and compiled")
def test_quantize_takes_models_with_a_sliding_window():
    inputs, found = batch("mistral", 3, 9, padding=3, seed=5), []
    for cache in ("int8", "float"):  # values in float caches are not rotated
        recipe = {"*": {"cache": cache, "rotate": False}}
        model = intaglio.quantize(float_model("mistral"), calibration("mistral"), recipe=recipe)
        found.append(generated(model, inputs))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow_params(torch.float16, reason="the same as in bfloat16")])
def test_models_in_half_precision_have_the_caches_of_float32(dtype):
    model, ids = float_model("llama").to(dtype), torch.randint(2, END, (3, 20))
    for cache, kept in (("int8", torch.uint8), ("float", torch.float32)):
        recipe = {"*": {"cache": cache, "rotate": False, "rounding": "nearest"}}
        int8_model = intaglio.quantize(model, calibration("llama"), recipe=recipe, progress=False)
        full, past = int8_model(ids).logits, int8_model(ids[:, :7])
        assert {layer.keys.dtype for layer in layers_of(past)} == {kept}
        assert torch.equal(int8_model(ids[:, 7:], past_key_values=past.past_key_values).logits, full[:, 7:])
        assert full.dtype is dtype


@pytest.mark.parametrize(
    "name", ["GPTNeoX", *slow_params("GPTBigCode", reason="values are slices of a layer, too; one is compiled above")]
)
def test_values_that_are_slices_of_a_layer_are_not_rotated(name):
    """Keys and values of a cache that are what a layer computes, without an operator in between."""
    kind = getattr(library(), f"{name}ForCausalLM")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = kind(
        kind.config_class(vocab_size=64, initializer_range=0.3, **sizes, bos_token_id=0, eos_token_id=1)
    ).eval()
    ids = torch.randint(2, 64, (3, 24))
    int8_model = intaglio.quantize(model, [{"input_ids": ids}] * 2, recipe={"*": {"cache": "int8"}}, progress=False)
    with torch.no_grad():
        exact = model(ids).logits
    assert (int8_model(ids).logits - exact).square().sum() < 1e-2 * exact.square().sum()


@pytest.mark.slow(reason="three programs are captured and compiled")
def test_encoder_decoders_with_sliding_windows_generate():
    part = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 6}
    part |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    config = library().T5GemmaConfig(encoder=dict(part), decoder=dict(part), vocab_size=64, **ids)
    model = library().T5GemmaForConditionalGeneration(config).eval()
    draw = torch.Generator().manual_seed(1)
    batches = [{name: torch.randint(3, 64, (2, 15), generator=draw) for name in ("input_ids", "labels")} for _ in "ab"]
    int8_model = intaglio.quantize(model, batches, recipe=UNCORRECTED, progress=False)
    inputs = {"input_ids": batches[0]["input_ids"], "attention_mask": torch.ones(2, 15, dtype=torch.int64)}
    inputs["attention_mask"][0, -4:] = 0
    given = {"max_new_tokens": 12, "do_sample": False}
    found = int8_model.generate(**inputs, **given)
    assert torch.equal(found, int8_model.generate(**inputs, **given, use_cache=False))
    with torch.no_grad():
        exact = model(**inputs, decoder_input_ids=found).logits
    logits = int8_model(**inputs, decoder_input_ids=found).logits
    assert (logits - exact).square().sum() < 1e-2 * exact.square().sum()
