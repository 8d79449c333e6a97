"""A SentenceTransformer goes in, and one comes out whose transformer is quantized."""

import contextlib

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import CalibrationError, InputError
from intaglio.integrations.sentence_transformers import feature_batches, inner_calls, quantize_model
from support.torchvision_stub import import_torchvision

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "sat", "ran"]
SENTENCES = ["a cat sat", "a dog ran", "a dog sat a cat ran", "cat"] * 10


class Sentences(nn.Module):
    """Has the methods of a SentenceTransformer that the integration calls; its ids are lengths of words."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def preprocess(self, sentences: list[str]) -> dict[str, object]:
        longest = max(len(one.split()) for one in sentences)
        ids = [[len(word) for word in one.split()] + [0] * (longest - len(one.split())) for one in sentences]
        return {"input_ids": torch.tensor(ids), "modality": "text"}

    def forward(self, features: dict[str, object]) -> torch.Tensor:
        return self.inner.forward(input_ids=features["input_ids"], return_dict=True)


def test_sentences_are_joined_to_batches():
    found = list(feature_batches(Sentences(None), SENTENCES))
    assert [len(features["input_ids"]) for features in found] == [32, 8]


def test_batches_of_sentences_and_of_features_stay_batches():
    model = Sentences(None)
    assert [len(f["input_ids"]) for f in feature_batches(model, [SENTENCES[:3], SENTENCES[3:5]])] == [3, 2]
    features = model.preprocess(SENTENCES[:2])
    assert next(feature_batches(model, [features])) is features


@pytest.mark.parametrize("data", ["a cat", 3, [3], [[]], [["a", 3]]])
def test_other_data_is_an_error_with_a_remedy_that_works(data):
    model = Sentences(None)
    with pytest.raises(CalibrationError, match=r"pass a list of sentences, or batches that preprocess\(sentences\)"):
        list(feature_batches(model, data))
    assert list(feature_batches(model, ["a cat"]))
    assert list(feature_batches(model, [model.preprocess(["a cat"])]))


def test_the_transformer_does_not_run_and_is_left_as_it_was():
    inner = nn.Linear(2, 2)
    (call,) = inner_calls(Sentences(inner), inner, ["a cat"])
    assert set(call) == {"input_ids"}, "tensors only: return_dict is not one"
    assert "forward" not in vars(inner)


def test_a_model_without_a_transformer_is_an_error():
    with pytest.raises(InputError, match="quantize its modules one by one"):
        quantize_model(Sentences(nn.Linear(2, 2)), SENTENCES, intaglio.quantize)
    intaglio.quantize(nn.Linear(2, 2), [torch.randn(8, 2)])


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory):
    with contextlib.suppress(ImportError):
        import_torchvision()
    transformers, library = map(pytest.importorskip, ("transformers", "sentence_transformers"))
    folder = str(tmp_path_factory.mktemp("float"))
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **SMALL)).save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return library.SentenceTransformer(folder, device="cpu")


def test_a_sentence_transformer_encodes_as_before(sentence_model, tmp_path):
    int8_model = intaglio.quantize(sentence_model, SENTENCES)
    assert type(int8_model) is type(sentence_model)
    assert isinstance(int8_model[0].model, intaglio.QuantizedModel)
    assert not isinstance(sentence_model[0].model, intaglio.QuantizedModel)
    expected, found = (torch.from_numpy(one.encode(SENTENCES)) for one in (sentence_model, int8_model))
    assert torch.nn.functional.cosine_similarity(expected, found).min() > 0.99
    from intaglio.integrations.transformers import from_pretrained

    int8_model.save(str(tmp_path))
    sentence_model[0].model = from_pretrained(tmp_path)
    assert torch.equal(torch.from_numpy(sentence_model.encode(SENTENCES)), found)
