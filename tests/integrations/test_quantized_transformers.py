"""Quantized models of transformers keep the surface of the float model: class, signature, results, files, pipelines."""

import copy
import inspect
import json
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, CaptureError, InputError
from intaglio.integrations import integration_for
from support import transformers_library
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "on", "mat", "ran", "fast"]
WORDS += ["slow", "is", "very", "good", "bad", "and"]
TEXTS = ["the cat sat on the mat", "a dog ran fast and is very good", "the slow cat is bad", "mat"]


@pytest.fixture(scope="module")
def library():
    return transformers_library.library()


@pytest.fixture(scope="module")
def tokenizer(library):
    return library.BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})


def bert(library, name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = library.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, num_labels=3, **SMALL)
    return getattr(library, name)(config).eval()


@pytest.fixture(scope="module")
def float_model(library):
    return bert(library, "BertForSequenceClassification")


@pytest.fixture(scope="module")
def batch(tokenizer):
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def int8_model(float_model, batch):
    return intaglio.quantize(float_model, [batch])


def test_the_class_is_that_of_the_float_model_and_of_quantized_models(library, float_model, int8_model):
    assert isinstance(int8_model, intaglio.QuantizedModel)
    assert isinstance(int8_model, library.BertForSequenceClassification)
    assert type(int8_model).__name__ == "BertForSequenceClassification"
    assert inspect.signature(int8_model.forward) == inspect.signature(float_model.forward)
    assert int8_model.coverage.macs == 1.0


def test_attributes_are_those_of_the_float_model(float_model, int8_model):
    assert int8_model.config.to_dict() == float_model.config.to_dict()
    assert int8_model.config is not float_model.config
    assert (int8_model.device, int8_model.dtype) == (float_model.device, float_model.dtype)
    assert int8_model.main_input_name == float_model.main_input_name
    assert int8_model.name_or_path == float_model.name_or_path
    assert not int8_model.can_generate()
    assert int8_model.generation_config is None


def test_results_have_the_class_of_the_library_or_are_tuples(library, int8_model, batch):
    found = int8_model(**batch)
    assert type(found) is library.modeling_outputs.SequenceClassifierOutput
    assert torch.equal(int8_model(**batch, return_dict=False)[0], found.logits)


SAME = [{"use_cache": False}, {"labels": None}, {"output_attentions": False}, {"is_first_iteration": True}]


@pytest.mark.parametrize("more", SAME)
def test_arguments_that_change_nothing_are_accepted(int8_model, batch, more):
    assert torch.equal(int8_model(**batch, **more).logits, int8_model(**batch).logits)


@pytest.mark.parametrize("more", [{"output_attentions": True}, {"position_ids": torch.zeros(4, 10, dtype=torch.int64)}])
def test_arguments_that_the_examples_did_not_have_are_errors(int8_model, batch, more):
    (name,) = more
    with pytest.raises(InputError, match=f"(?s)argument '{name}'.*the examples had no {name}.*leave it out"):
        int8_model(**batch, **more)


def test_labels_are_refused_because_the_program_computes_no_loss(int8_model, batch):
    labels = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"(?s)argument 'labels'.*computes no loss.*compute the loss from the logits"):
        int8_model(**batch, labels=labels)
    nn.functional.cross_entropy(int8_model(**batch).logits, labels)


def test_arguments_go_by_position_in_the_order_of_the_float_model(int8_model, batch):
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert torch.equal(int8_model(*[batch[name] for name in names]).logits, int8_model(**batch).logits)


def test_more_positional_arguments_than_forward_has_are_an_error(int8_model, batch):
    with pytest.raises(InputError, match="pass arguments by their names"):
        int8_model(*[batch["input_ids"]] * 20)
    int8_model(**batch)


def test_an_argument_given_twice_is_an_error(int8_model, batch):
    with pytest.raises(InputError, match="input_ids is given by position and by name"):
        int8_model(batch["input_ids"], **batch)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_the_surface(int8_model, batch, copied):
    found = copied(int8_model)
    assert type(found) is type(int8_model)
    assert found.config.to_dict() == int8_model.config.to_dict()
    assert torch.equal(found(**batch).logits, int8_model(**batch).logits)


def test_a_folder_keeps_the_class_the_configuration_and_the_bits(int8_model, batch, tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    int8_model.save_pretrained(tmp_path / "folder")
    found = from_pretrained(tmp_path / "folder")
    assert type(found) is type(int8_model)
    assert found.config.architectures == ["BertForSequenceClassification"]
    assert found.config.num_labels == 3
    assert found.name_or_path == str(tmp_path / "folder")
    assert torch.equal(found(**batch).logits, int8_model(**batch).logits)


def test_generation_configurations_are_stored_too(library, int8_model, tmp_path):
    from intaglio.integrations.transformers.folders import read_configs, write_configs

    generation = library.GenerationConfig(max_new_tokens=7)
    write_configs(tmp_path, "BertModel", int8_model.config, generation)
    kind, _, found = read_configs(tmp_path, None)
    assert kind is library.BertModel
    assert found.max_new_tokens == 7


@pytest.mark.parametrize("names", [["system"], ["AutoConfig"], ["os.path"], [], None, ["BertModel", "BertModel"], [3]])
def test_folders_name_only_models_of_the_library(library, int8_model, tmp_path, names):
    from intaglio.integrations.transformers import from_pretrained

    entries = {**int8_model.config.to_dict(), "architectures": names, "auto_map": {"AutoModel": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(entries, default=str))
    with pytest.raises(ArtifactError, match=r"is not a model of transformers|not one class"):
        from_pretrained(tmp_path)


def test_a_class_outside_of_the_library_is_given(library, int8_model, batch, tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    class Own(library.BertForSequenceClassification):
        pass

    int8_model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "Own"))
    with pytest.raises(ArtifactError, match="model_class="):
        from_pretrained(tmp_path)
    found = from_pretrained(tmp_path, model_class=Own)
    assert isinstance(found, Own)
    assert torch.equal(found(**batch).logits, int8_model(**batch).logits)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"architectures": ["BertModel"], "num_attention_heads": {}}'])
def test_malformed_configurations_are_errors(library, tmp_path, text):
    from intaglio.integrations.transformers import from_pretrained

    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match="save_pretrained of an int8 model"):
        from_pretrained(tmp_path)


def test_a_folder_of_another_kind_is_an_error(library, tmp_path):
    from intaglio.integrations.transformers import from_pretrained

    with pytest.raises(ArtifactError, match=r"config\.json"):
        from_pretrained(tmp_path)


def test_the_class_itself_loads_no_int8_models(int8_model):
    with pytest.raises(InputError, match=r"integrations\.transformers\.from_pretrained"):
        type(int8_model).from_pretrained("folder")


def test_int8_models_are_not_quantized_again(int8_model, batch):
    with pytest.raises(CaptureError, match="quantized already"):
        intaglio.quantize(int8_model, [batch])


@pytest.mark.slow(reason="a process imports PyTorch")
def test_a_library_is_imported_only_for_its_models():
    code = "import sys, intaglio.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_models_have_no_integration():
    assert integration_for(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BertModel", ()),
        ("BertForSequenceClassification", ()),
        ("LlamaModel", ("",)),
        ("LlamaForSequenceClassification", ("",)),
        ("LlamaForCausalLM", ("model", "lm_head")),
        ("T5ForConditionalGeneration", ("decoder", "lm_head")),
        ("T5EncoderModel", ()),
        ("CLIPTextModel", ()),
    ],
)
def test_decoders_are_models_that_generate_and_their_base_models(library, name, expected):
    kind = getattr(library, name)
    model = kind(kind.config_class(**SMALL, vocab_size=20, d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=64))
    assert integration_for(model).decoder_paths(model) == expected


def test_decoders_inside_of_a_sentence_transformer_are_found(library):
    from intaglio.integrations import sentence_transformers  # imports the library

    config = library.LlamaConfig(vocab_size=20, **SMALL)
    inside = nn.ModuleDict({"0": library.LlamaModel(config), "1": bert(library, "BertModel"), "2": nn.Linear(2, 2)})
    assert sentence_transformers.decoder_paths(inside) == ("0",)


@pytest.mark.slow(reason="compiles two models; parts of decoders and decoders with a cache have scales per token too")
@pytest.mark.parametrize(("name", "settings"), [("LlamaModel", {}), ("LlamaForCausalLM", {"use_cache": False})])
def test_decoders_without_a_cache_have_scales_per_token(library, name, settings, batch):
    torch.manual_seed(0)
    kind = getattr(library, name)
    model = kind(kind.config_class(vocab_size=len(WORDS), **SMALL, **settings)).eval()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    found = intaglio.quantize(model, [inputs], recipe=UNCORRECTED, progress=False)
    assert found.text("integer").count(" = quantize_rows(") >= 4
    calibrated = intaglio.quantize(model, [inputs], recipe="transformer", progress=False)
    assert " = quantize_rows(" not in calibrated.text("integer")


def test_a_pipeline_takes_the_model(library, float_model, int8_model, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        pipes = [
            library.pipeline("text-classification", model=m, tokenizer=tokenizer) for m in (float_model, int8_model)
        ]
        expected, found = (pipe(TEXTS, batch_size=2) for pipe in pipes)
    assert "is not supported" not in caplog.text
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    assert all(abs(a["score"] - b["score"]) < 0.01 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "task", "text"),
    slow_params(
        ("BertModel", "feature-extraction", TEXTS[0]),
        ("BertForMaskedLM", "fill-mask", "the [MASK] sat on the mat"),
        reason="another model of the kind that the test above quantizes",
    ),
)
def test_pipelines_of_text_take_their_models(library, tokenizer, batch, name, task, text):
    float_model = bert(library, name)
    int8_model = intaglio.quantize(float_model, [batch])
    expected, found = (library.pipeline(task, model=m, tokenizer=tokenizer)(text) for m in (float_model, int8_model))
    if task == "fill-mask":
        assert [one["token"] for one in found] == [one["token"] for one in expected]
    else:
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=0.05)


@pytest.mark.slow(reason="compiles a second model")
def test_a_pipeline_of_images_takes_the_model(library):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    torch.manual_seed(0)
    config = library.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SMALL)
    float_model = library.ViTForImageClassification(config).eval()
    int8_model = intaglio.quantize(float_model, [{"pixel_values": torch.randn(8, 3, 32, 32)}])
    processor = library.ViTImageProcessor(size={"height": 32, "width": 32})
    picture = image.frombytes("RGB", (40, 40), bytes(range(48)) * 100)
    expected, found = (
        library.pipeline("image-classification", model=m, image_processor=processor)(picture)
        for m in (float_model, int8_model)
    )
    assert [one["label"] for one in found] == [one["label"] for one in expected]


@pytest.mark.slow(reason="a search of a model of a library")
def test_the_recipe_of_a_search_gives_a_model_of_the_class(library, float_model, tokenizer, untimed_searches):
    """A search itself returns a model with the configuration, but without the class."""
    data = [dict(tokenizer(TEXTS, padding=True, return_tensors="pt")) for _ in range(2)]

    def metric(model: nn.Module) -> float:
        assert model.config.model_type == "bert"
        return -float((model(**data[0]).logits - float_model(**data[0]).logits).abs().max())

    quantizer = stages.Quantizer(intaglio.Recipe.of(UNCORRECTED))
    options = {"max_drop": 1.0, "relative": False, "progress": False}
    searched = intaglio.search(float_model, data, metric, quantizer=quantizer, **options)
    int8 = intaglio.quantize(float_model, data, recipe=searched.recipe, progress=False)
    assert isinstance(int8, library.BertForSequenceClassification)
    assert torch.equal(int8(**data[0]).logits, searched.model(**data[0]).logits)


def not_captured(library):
    """Return a model whose result depends on its values, and batches for it."""

    class Checked(library.BertModel):
        def forward(self, input_ids, attention_mask=None):
            found = super().forward(input_ids, attention_mask=attention_mask)
            return found if found.pooler_output.sum().item() > 0 else found.pooler_output

    torch.manual_seed(0)
    config = library.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SMALL)
    model, ids = Checked(config).eval(), torch.randint(1, len(WORDS), (4, 6))
    return model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()} for _ in range(2)]


@pytest.mark.slow(reason="captures another model; test_partly_quantized.py refuses a smaller one")
def test_a_model_that_cannot_be_captured_is_refused_with_strict(library):
    model, batches = not_captured(library)
    with pytest.raises(CaptureError, match="data-dependent"):
        intaglio.quantize(model, batches, strict=True, progress=False)


@pytest.mark.slow(reason="compiles the parts of another model; parts of detectors have tests in parts")
def test_a_model_that_cannot_be_captured_is_quantized_in_parts(library):
    model, batches = not_captured(library)
    int8 = intaglio.quantize(model, iter(batches), recipe=UNCORRECTED, progress=False)
    assert isinstance(int8, intaglio.PartlyQuantizedModel)
    assert {"encoder", "pooler"} <= set(int8.parts)
    assert int8.config is int8.model.config
    torch.testing.assert_close(_pooled(int8(**batches[0])), _pooled(model(**batches[0])), rtol=0, atol=0.1)


def _pooled(found):
    return getattr(found, "pooler_output", found)
