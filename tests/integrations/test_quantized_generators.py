"""Quantized models that generate: the cache, `generate`, folders and pipelines, against the interpreter."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch

import intaglio
from intaglio.errors import ArtifactError, CalibrationError, InputError, SelectorError, UnsupportedError
from intaglio.integrations import integration_for
from intaglio.tune.compare_models import with_int8_caches
from support.generators import (
    END,
    MODELS,
    PAD,
    VOCABULARY,
    batch,
    calibration,
    float_model,
    generated,
    library,
    quantized,
)
from support.recipes import UNCORRECTED
from support.slow_params import slow_params


def test_cached_steps_give_the_bits_of_a_full_forward():
    _, int8_model, _ = quantized("llama")
    ids = torch.randint(2, END, (3, 20), generator=torch.Generator().manual_seed(1))
    full = int8_model(ids).logits
    past = int8_model(ids[:, :4])
    assert torch.equal(past.logits, full[:, :4])
    for end in range(5, 21):
        past = int8_model(ids[:, end - 1 : end], past_key_values=past.past_key_values)
        assert torch.equal(past.logits, full[:, end - 1 : end])
    assert past.past_key_values.get_seq_length() == 20


def test_several_tokens_can_follow_a_past():
    _, int8_model, _ = quantized("llama")
    ids = torch.randint(2, END, (2, 11), generator=torch.Generator().manual_seed(2))
    past = int8_model(ids[:, :4]).past_key_values
    assert torch.equal(int8_model(ids[:, 4:], past_key_values=past).logits, int8_model(ids).logits[:, 4:])


@pytest.mark.parametrize(
    ("name", "numbering"),
    [
        ("llama", "tokens"),
        *slow_params(("roberta", PAD), ("gpt2", "tokens"), ("opt", "mask"), reason="each is compiled"),
    ],
)
def test_tokens_are_numbered_as_in_the_float_model(name, numbering):
    model, int8_model, _ = quantized(name)
    assert int8_model.listed.numbering == numbering
    inputs = batch(name, padding=3, seed=8)
    rows = inputs["attention_mask"].bool()
    inputs["input_ids"][1, 4] = PAD
    with torch.no_grad():
        wanted = model(**inputs).logits
    found = int8_model(**inputs).logits
    assert (found - wanted)[rows].square().mean() < 1e-2 * wanted[rows].square().mean()
    assert (model(inputs["input_ids"]).logits - int8_model(inputs["input_ids"]).logits).square().mean() < 1e-2 * (
        wanted.square().mean()
    )


@pytest.mark.slow(reason="each model is captured and compiled")
def test_a_step_numbers_tokens_behind_those_of_the_cache():
    int8_model = quantized("roberta")[1]
    ids = batch("roberta")["input_ids"]
    past = int8_model(ids[:, :5]).past_key_values
    assert torch.equal(int8_model(ids[:, 5:], past_key_values=past).logits, int8_model(ids).logits[:, 5:])


@pytest.mark.slow(reason="each model is captured and compiled")
def test_calls_need_positions_if_those_of_the_float_model_are_not_understood():
    model = float_model("roberta")
    embeddings = model.roberta.embeddings
    own = type(embeddings).create_position_ids_from_input_ids
    embeddings.create_position_ids_from_input_ids = lambda *args: own(*args).flip(1)
    int8_model = intaglio.quantize(model, calibration("roberta"), recipe=UNCORRECTED, progress=False)
    inputs = batch("roberta")
    with pytest.raises(InputError, match=r"(?s)has no positions.*pass the positions"):
        int8_model(**inputs)
    assert int8_model(**inputs, position_ids=torch.arange(12)).logits.shape == (4, 12, VOCABULARY)
    assert generated(int8_model, inputs).shape[1] > 12


GREEDY, BEAMS, SAMPLED = {}, {"num_beams": 3}, {"do_sample": True, "top_k": 10}
WITHOUT, STATIC = {"use_cache": False}, {"cache_implementation": "static"}
WAYS = [GREEDY, BEAMS, SAMPLED, WITHOUT, STATIC]
CASES = [("llama", way) for way in WAYS]
SLOW = [(name, way) for name in MODELS if name != "llama" for way in (GREEDY, BEAMS)]
SLOW += [("gpt2", STATIC), ("bart", STATIC)]


@pytest.mark.parametrize(("name", "way"), [*CASES, *slow_params(*SLOW, reason="each model is captured and compiled")])
def test_tokens_are_those_of_the_interpreter(name, way):
    _, int8_model, interpreted = quantized(name)
    inputs = batch(name, 3, 9, padding=3, seed=5)
    found = generated(int8_model, inputs, **way)
    assert torch.equal(found, generated(interpreted, inputs, **way))
    assert len({tuple(row.tolist()) for row in found}) > 1 or name in ("bart", "whisper")


@pytest.mark.parametrize("way", [WITHOUT, STATIC])
def test_tokens_do_not_depend_on_the_cache(way):
    _, int8_model, _ = quantized("llama")
    inputs = batch("llama", 3, 9, padding=3, seed=6)
    assert torch.equal(generated(int8_model, inputs, **way), generated(int8_model, inputs))


def test_what_is_left_out_of_the_result_can_be_chosen():
    _, int8_model, _ = quantized("llama")
    inputs = batch("llama")
    full = int8_model(**inputs)
    assert int8_model(**inputs, use_cache=False).past_key_values is None
    assert torch.equal(int8_model(**inputs, return_dict=False)[0], full.logits)
    assert type(full) is library().modeling_outputs.CausalLMOutputWithPast


def test_the_cache_is_left_out_if_the_configuration_says_so():
    _, int8_model, _ = quantized("llama")
    changed, ids = copy.deepcopy(int8_model), torch.tensor([[5, 9]])
    assert changed(ids).past_key_values is not None
    changed.config.use_cache = False
    assert changed(ids).past_key_values is None
    changed.config = copy.deepcopy(int8_model.config)
    assert changed(ids).past_key_values is not None


def test_the_configuration_of_a_decoder_is_no_copy():
    transformers = library()
    from intaglio.integrations.transformers.steps.decoder_cache import decoder_config

    for kind in (transformers.LlamaConfig, transformers.T5Config, transformers.WhisperConfig):
        config = kind()
        assert decoder_config(config) is config
    composite = transformers.LlavaConfig()
    assert decoder_config(composite) is composite.text_config


def test_results_are_those_that_the_library_makes():
    transformers = library()
    from intaglio.integrations.transformers.steps.decoder_runs import new_output

    outputs, initialized = transformers.modeling_outputs, []

    @dataclasses.dataclass
    class Checked(outputs.CausalLMOutput):
        def __post_init__(self):
            super().__post_init__()
            initialized.append(self)

    values = {"logits": torch.ones(1, 2), "loss": torch.ones(1)}
    for kind in (outputs.CausalLMOutput, outputs.CausalLMOutputWithPast, outputs.Seq2SeqLMOutput, Checked):
        found, expected = new_output(kind, values), kind(**values)
        assert type(found) is kind
        assert list(found.items()) == list(expected.items())
        assert vars(found) == vars(expected)
        assert [*map(id, found.to_tuple())] == [*map(id, expected.to_tuple())]
    assert len(initialized) == 2


@pytest.mark.parametrize("kept", [1, 2, 0, 50, torch.tensor([5]), torch.tensor([0, -1, 3, 0])], ids=str)
def test_logits_to_keep_are_those_of_all_tokens(kept):
    _, int8_model, _ = quantized("llama")
    inputs = batch("llama", padding=3)
    every = int8_model(**inputs).logits
    wanted = every[:, kept] if isinstance(kept, torch.Tensor) else every[:, -kept:]
    found = int8_model(**inputs, logits_to_keep=kept)
    assert torch.equal(found.logits, wanted)
    assert found.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("kept", [torch.tensor([12]), torch.tensor([[0]]), torch.tensor([0.0]), "all"], ids=str)
def test_logits_to_keep_that_do_not_exist_are_errors(kept):
    _, int8_model, _ = quantized("llama")
    with pytest.raises(InputError, match=r"(?s)argument 'logits_to_keep'.*pass the number of the last tokens"):
        int8_model(**batch("llama"), logits_to_keep=kept)


@pytest.mark.parametrize("name", ["llama", *slow_params("gpt2", "mistral", "opt", reason="each is compiled")])
def test_a_prompt_computes_the_logits_that_are_kept_only(name):
    program = quantized(name)[1].programs["decoder"]
    graph, shapes = program.graph, {entry.name: entry.type.shape for entry in program.signature.inputs}
    sizes = {graph.types[op.output].shape for op in graph.ops if op.origin.path == "lm_head"}
    assert sizes == {(*shapes["inputs_tokens"][:1], *shapes["inputs_kept"], VOCABULARY)}
    assert not set(shapes["inputs_kept"]).intersection(shapes["inputs_tokens"])


def test_generating_does_not_make_the_modules_of_the_float_model():
    int8_model = quantized("llama")[1]
    vars(int8_model).pop("_structure", None)
    generated(int8_model, batch("llama"))
    assert "_structure" not in vars(int8_model)
    assert int8_model.model.layers
    assert "_structure" in vars(int8_model)


def test_the_surface_is_that_of_the_float_model():
    model, int8_model, _ = quantized("llama")
    assert isinstance(int8_model, library().LlamaForCausalLM)
    assert int8_model.can_generate()
    assert int8_model.config.use_cache
    assert int8_model.config.to_dict() == model.config.to_dict()
    assert int8_model.generation_config.to_dict() == model.generation_config.to_dict()
    assert (int8_model.device, int8_model.dtype) == (model.device, model.dtype)
    assert int8_model.coverage.macs == 1.0
    assert int8_model.model.layers[0].self_attn.head_dim == 8


def test_pipelines_generate_text():
    model, int8_model, _ = quantized("llama")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(5, VOCABULARY))]
    tokenizer = library().BertTokenizer(vocab={word: index for index, word in enumerate(words)}, padding_side="left")
    texts = ["w7 w8 w9", "w20 w21 w22 w23 w24 w25"]
    results = []
    for one in (model, int8_model):
        generate = library().pipeline("text-generation", model=one, tokenizer=tokenizer, batch_size=2)
        results.append(generate(texts, max_new_tokens=3, do_sample=False))
    assert results[0] == results[1]


@pytest.mark.slow(reason="each model is captured and compiled")
def test_pipelines_recognize_speech():
    words = {f"w{index}": index for index in range(END)}
    tokenizer = library().WhisperTokenizer(vocab={**words, "<|endoftext|>": END}, merges=[])
    sizes = {"feature_size": 4, "chunk_length": 1, "sampling_rate": 4000, "hop_length": 100, "n_fft": 200}
    features = library().WhisperFeatureExtractor(**sizes)
    model = float_model("whisper", num_mel_bins=4)
    draw = torch.Generator().manual_seed(1)
    batches = [{"input_features": torch.randn(4, 4, 40, generator=draw), "labels": torch.full((4, 9), 5)}]
    int8_model = intaglio.quantize(model, batches)
    sound = torch.randn(4000, generator=draw).numpy()
    recognize = library().pipeline(
        "automatic-speech-recognition", model=int8_model, tokenizer=tokenizer, feature_extractor=features
    )
    found = recognize({"raw": sound, "sampling_rate": 4000}, generate_kwargs={"max_new_tokens": 5})
    given = features(sound, sampling_rate=4000, return_tensors="pt").input_features
    assert found["text"] == tokenizer.decode(int8_model.generate(given, max_new_tokens=5)[0])
    assert len(found["text"].split("w")) == 6


def test_folders_keep_the_programs_and_the_configurations(tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    _, int8_model, _ = quantized("llama")
    int8_model.save_pretrained(tmp_path)
    found = from_pretrained(tmp_path)
    inputs = batch("llama", 2, 7)
    assert type(found) is type(int8_model)
    assert torch.equal(generated(found, inputs), generated(int8_model, inputs))
    (tmp_path / "programs.json").write_text('{"programs": ["other"], "numbering": "tokens"}')
    with pytest.raises(ArtifactError, match="does not list the programs"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_generate_too(copied):
    _, int8_model, _ = quantized("llama")
    inputs = batch("llama", 2, 7)
    assert torch.equal(generated(copied(int8_model), inputs), generated(int8_model, inputs))


def test_arguments_that_the_programs_do_not_take_are_errors():
    _, int8_model, _ = quantized("llama")
    inputs = batch("llama")
    with pytest.raises(InputError, match=r"(?s)argument 'output_attentions'.*leave output_attentions out"):
        int8_model(**inputs, output_attentions=True)
    with pytest.raises(InputError, match=r"(?s)argument 'labels'.*leave labels out"):
        int8_model(**inputs, labels=inputs["input_ids"])
    with pytest.raises(InputError, match="it has no input_ids"):
        int8_model(attention_mask=inputs["attention_mask"])
    int8_model(**inputs, output_attentions=False, labels=None)


def test_positions_in_the_cache_are_accepted_if_they_are_those_of_the_tokens():
    """`generate` of transformers 5.0 passes them."""
    _, int8_model, _ = quantized("llama")
    ids = batch("llama")["input_ids"]
    found = int8_model(ids[:, :8], cache_position=torch.arange(8))
    cache = found.get("cache", found.get("past_key_values"))
    with pytest.raises(InputError, match=r"(?s)argument 'cache_position'.*leave cache_position out"):
        int8_model(ids[:, 8:], past_key_values=cache, cache_position=torch.arange(4))
    logits = int8_model(ids[:, 8:], past_key_values=cache, cache_position=torch.arange(8, 12)).logits
    assert torch.equal(logits, int8_model(ids).logits[:, 8:])


def test_batches_of_encoder_decoders_have_tokens_of_the_decoder_or_labels():
    model = float_model("t5")
    from intaglio.integrations.transformers.steps.cached_steps import StepNames
    from intaglio.integrations.transformers.steps.calibration_calls import decoder_tokens

    names, inputs, labels = StepNames("decoder_input_ids", None, None), batch("t5"), torch.randint(2, END, (4, 5))
    with pytest.raises(CalibrationError, match="add 'decoder_input_ids' to the batches"):
        decoder_tokens(model, names, inputs)
    assert decoder_tokens(model, names, {**inputs, "decoder_input_ids": labels}).tokens is labels
    shifted = decoder_tokens(model, names, {**inputs, "labels": labels}).tokens
    assert torch.equal(shifted, torch.cat([torch.full((4, 1), PAD), labels[:, :-1]], 1))


def test_masks_of_other_shapes_are_errors():
    _, int8_model, _ = quantized("llama")
    ids = batch("llama")["input_ids"]
    with pytest.raises(InputError, match=r"(?s)there are 12 tokens.*pass a mask of the whole sequence"):
        int8_model(ids, attention_mask=torch.ones(4, 5))
    with pytest.raises(InputError, match=r"(?s)not the causal mask.*pass a mask of shape"):
        int8_model(ids, attention_mask=torch.ones(4, 1, 12, 12, dtype=torch.bool))
    int8_model(ids, attention_mask=torch.ones(4, 12))


def test_a_causal_mask_may_be_for_all_samples():
    _, int8_model, _ = quantized("llama")
    ids = batch("llama")["input_ids"]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    assert torch.equal(int8_model(ids, attention_mask=mask).logits, int8_model(ids).logits)


@pytest.mark.parametrize(
    ("call", "problem", "remedy", "follow"),
    [
        (
            lambda m, ids: m(ids[0]),
            r"shape is \[12\], not a batch",
            r"torch\.tensor\(\[ids\]\)",
            lambda m, ids: m(ids[:1]),
        ),
        (lambda m, ids: m(ids[0].tolist()), "it is a list, not a batch", "pass a tensor", lambda m, ids: m(ids[:1])),
        (
            lambda m, ids: m(ids, position_ids=torch.arange(11)[None]),
            "the call has 12 tokens",
            "pass the positions of the 12 tokens, or leave them out",
            lambda m, ids: m(ids, position_ids=torch.arange(12)[None]),
        ),
        (
            lambda m, ids: m(ids, attention_mask=torch.ones(3, 12)),
            "it is for 3 samples, but the call has 4",
            "pass a mask with a row for every sample",
            lambda m, ids: m(ids, attention_mask=torch.ones(4, 12)),
        ),
        (
            lambda m, ids: m(ids[:1, :1], past_key_values=m(ids).past_key_values),
            "it holds tokens of 4 samples, but the call has 1",
            "pass tokens of every sample of the cache, or begin with an empty one",
            lambda m, ids: m(ids[:, :1], past_key_values=m(ids).past_key_values),
        ),
    ],
    ids=["one text", "a list", "positions", "a mask", "a cache"],
)
def test_arguments_that_do_not_fit_the_batch_are_errors(call, problem, remedy, follow):
    _, int8_model, _ = quantized("llama")
    ids = batch("llama")["input_ids"]
    with pytest.raises(InputError, match=f"(?s){problem}.*{remedy}"):
        call(int8_model, ids)
    follow(int8_model, ids)


@pytest.mark.slow(reason="each model is captured and compiled")
def test_static_caches_of_sliding_windows_are_refused():
    _, int8_model, _ = quantized("mistral")
    with pytest.raises(InputError, match=r"(?s)StaticSlidingWindowLayer.*leave the cache"):
        generated(int8_model, batch("mistral", 2, 7), **STATIC)
    generated(int8_model, batch("mistral", 2, 7))


def test_dynamic_shapes_are_refused_for_models_with_a_cache():
    model = float_model("llama")
    with pytest.raises(InputError, match=r"leave dynamic_shapes out, or set model.config.use_cache = False"):
        intaglio.quantize(model, calibration("llama"), dynamic_shapes={"input_ids": None})


@pytest.mark.slow(reason="quantizes two programs and their parts; encoder-decoders without experts are tested above")
def test_encoder_decoders_with_experts_generate():
    """Their forward reads fields of the encoder's result that tuples do not have. Experts are quantized in parts."""
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    kind = library().SwitchTransformersForConditionalGeneration
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **layers, decoder_start_token_id=0)).eval()
    draw = torch.Generator().manual_seed(1)
    data = [
        {name: torch.randint(2, 31, (4, 9), generator=draw) for name in ("input_ids", "decoder_input_ids")}
        for _ in range(3)
    ]
    quantized = intaglio.quantize(model, data, progress=False)
    given = {"input_ids": data[0]["input_ids"], "max_new_tokens": 8, "do_sample": False}
    tokens = quantized.generate(**given)
    assert torch.equal(tokens, model.generate(**given))
    assert torch.equal(tokens, quantized.generate(**given, use_cache=False))


@pytest.mark.slow(reason="each model is captured and compiled")
def test_models_without_a_cache_generate_by_computing_all_tokens_again():
    int8_model = intaglio.quantize(float_model("llama", use_cache=False), calibration("llama"))
    assert isinstance(int8_model, intaglio.QuantizedModel)
    inputs = batch("llama", 2, 7)
    found, ids = generated(int8_model, inputs, max_new_tokens=4), inputs["input_ids"]
    for _ in range(4):
        logits = int8_model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)
    with pytest.raises(InputError, match="quantize again with batches that have 'position_ids'"):
        generated(int8_model, batch("llama", 2, 7, padding=2))


@pytest.fixture(scope="module")
def mamba():
    config = library().MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    torch.manual_seed(0)
    return library().MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def rwkv():
    config = library().RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, context_length=16)
    torch.manual_seed(0)
    return library().RwkvForCausalLM(config).eval()


def test_models_whose_steps_have_a_state_of_their_own_are_quantized_in_parts(rwkv):
    data = [batch("llama", 2, 5)]
    reason = "the steps of generate have state, which the batches do not have"
    assert integration_for(rwkv).reason_for_parts(rwkv, data) == reason
    assert integration_for(rwkv).reason_for_parts(rwkv, [data[0] | {"use_cache": False}]) is None
    assert not rwkv._forward_pre_hooks


@pytest.mark.slow(reason="quantizes a model of another family in parts")
def test_models_whose_steps_have_a_state_of_their_own_generate(rwkv):
    data = [batch("llama", 2, 5, seed=seed) for seed in range(2)]
    int8_model = intaglio.quantize(rwkv, data, recipe=UNCORRECTED, progress=False)
    inputs = batch("llama", 2, 5)
    with torch.no_grad():
        exact = rwkv(**inputs).logits
    assert (int8_model(**inputs).logits - exact).square().mean() < 0.01 * exact.square().mean()
    found = int8_model.generate(**inputs, max_new_tokens=3, min_new_tokens=3)
    assert found.shape == (2, 8)


@pytest.mark.slow(reason="quantizes a model of another family in parts")
def test_models_whose_cache_is_not_keys_and_values_generate_with_int8_parts(mamba, caplog, tmp_path):
    data = [batch("llama", length=7, seed=seed) for seed in range(2)]
    int8_model = intaglio.quantize(mamba, data, recipe=UNCORRECTED, progress=False)
    assert re.search("quantized in parts, because a layer of its cache is a [A-Za-z]+Layer", caplog.text)
    projections = [f"backbone.layers.0.mixer.{name}_proj" for name in ("in", "x", "out")]
    assert list(int8_model.parts) == [*projections, "lm_head"]
    assert all("quantize_rows(" in part.text("integer") for part in int8_model.parts.values())
    assert not re.search("contents are equal", caplog.text)
    for size, length in ((4, 7), (1, 3), (2, 8)):
        inputs = batch("llama", size, length)
        with torch.no_grad():
            exact = mamba(**inputs).logits
        assert (int8_model(**inputs).logits - exact).square().mean() < 0.01 * exact.square().mean()
        found = int8_model.generate(**inputs, max_new_tokens=3, min_new_tokens=3)
        assert found.shape == (size, length + 3)
    with pytest.raises(AttributeError, match=r"no 'save_pretrained': call its save\(path\), and intaglio.load_into"):
        int8_model.save_pretrained(tmp_path)
    int8_model.save(tmp_path / "model.intaglio")
    loaded = intaglio.load_into(tmp_path / "model.intaglio", mamba)
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=3, min_new_tokens=3), found)


@pytest.mark.slow(reason="each model is captured and compiled")
def test_models_without_their_cache_say_that_their_length_is_fixed(mamba):
    without = copy.deepcopy(mamba)
    without.config.use_cache = False
    int8_model = intaglio.quantize(without, [batch("llama", length=7)])
    assert int8_model(**batch("llama", 2, 7)).logits.shape == (2, 7, VOCABULARY)
    with pytest.raises(InputError, match=r"it has 8 tokens, but the model takes 7(?s:.*)quantize.*with intaglio.eager"):
        int8_model.generate(**batch("llama", 2, 8))
    prepared = intaglio.eager.prepare(mamba, (), example_kwargs=batch("llama", length=7))
    prepared.generate(**batch("llama", length=7), max_new_tokens=4)
    eager = intaglio.eager.convert(prepared)
    assert eager.generate(**batch("llama", 2, 8), max_new_tokens=3, min_new_tokens=3).shape == (2, 11)


@pytest.mark.slow(reason="each model is captured and compiled")
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_folders_of_encoder_decoders_keep_all_programs(name, tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    _, int8_model, _ = quantized(name)
    int8_model.save_pretrained(tmp_path)
    inputs = batch(name, 2, 7)
    assert torch.equal(generated(from_pretrained(tmp_path), inputs), generated(int8_model, inputs))


@pytest.mark.parametrize("name", ["llama", *slow_params("t5", "whisper", reason="each model is captured and compiled")])
def test_every_program_is_compared_with_the_float_model(name):
    model, int8_model, _ = quantized(name)
    with pytest.raises(InputError, match=r"call int8.compare\(model, data\)"):
        intaglio.compare(model, int8_model, calibration(name))
    found = int8_model.compare(model, iter(calibration(name)))
    assert found.keys() == int8_model.named_programs().keys()
    assert all(one.rows and min(one.results) > 10 and one.samples == 16 for one in found.values())


def test_a_comparison_takes_the_float_model():
    with pytest.raises(InputError, match=r"(?s)is a GPT2LMHeadModel.*pass the float model that was quantized"):
        quantized("llama")[1].compare(float_model("gpt2"), calibration("gpt2"))


@pytest.mark.slow(reason="compares two models; one is compared above")
def test_models_with_an_int8_cache_are_compared_by_everything_but_the_cache():
    model, int8_model, _ = quantized("llama")
    found = quantized("llama", "int8")[1].compare(model, calibration("llama"))["decoder"]
    plain = int8_model.compare(model, calibration("llama"))["decoder"]
    assert found.names == plain.names[:1]
    assert found.results == plain.results[:1]
    assert [row.name for row in found.rows if row.alone < 60] == [row.name for row in plain.rows if row.alone < 60]


def test_calls_with_a_past_are_not_compared_with_an_int8_cache():
    _, int8_model, _ = quantized("llama", "int8")
    program = int8_model.programs["decoder"]
    shapes = [
        tuple(size if isinstance(size, int) else 3 for size in one.type.shape) for one in program.signature.inputs
    ]
    kinds = [torch.float32 if one.type.dtype.name in ("U8", "F32") else torch.int64 for one in program.signature.inputs]
    call = tuple(torch.ones(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True))
    with pytest.raises(InputError, match=r"(?s)past_0_0 holds float values, .*compare calls whose cache is empty"):
        with_int8_caches(program, (call, {}))


@pytest.mark.slow(reason="each model is captured and compiled")
def test_selectors_may_mean_one_of_the_programs():
    model, skipped = float_model("t5"), "decoder.block.0.layer.2"
    int8_model = intaglio.quantize(model, calibration("t5"), skip=skipped)
    shares = {name: program.coverage.macs for name, program in int8_model.named_programs().items()}
    assert shares["encoder"] == shares["cross_attention"] == 1 > shares["decoder"]
    with pytest.raises(SelectorError, match=r"(?s)matches no operator.*nearest: decoder"):
        intaglio.quantize(model, calibration("t5"), skip="decodr.*")


@pytest.mark.slow(reason="each model is captured and compiled")
def test_a_whole_encoder_may_stay_in_float():
    model, inputs = float_model("t5"), batch("t5", 2, 7)
    int8_model = intaglio.quantize(model, calibration("t5"), skip="encoder.*")
    shares = {name: program.coverage.macs for name, program in int8_model.named_programs().items()}
    assert shares == {"encoder": 0, "cross_attention": 1, "decoder": 1}
    assert generated(int8_model, inputs).shape[0] == 2
    with pytest.raises(UnsupportedError, match="nothing in it can be quantized"):
        intaglio.quantize(model, calibration("t5"), skip="*")


@pytest.mark.slow(reason="each model is captured and compiled")
def test_search_takes_a_metric_of_calls_and_its_recipe_gives_a_model_that_generates():
    model, data = float_model("llama"), calibration("llama")
    inputs = batch("llama", 2, 7)
    with pytest.raises(InputError, match="let evaluate call the model"):
        intaglio.search(model, data, lambda tried: float(generated(tried, inputs).sum() > 0))
    wanted = model(**inputs).logits
    searched = intaglio.search(
        model, data, lambda tried: -float((tried(**inputs).logits - wanted).square().mean()), max_drop=0.1
    )
    found = intaglio.quantize(model, data, recipe=searched.recipe.with_parameters(None))
    assert generated(found, inputs).shape == (2, 23)
