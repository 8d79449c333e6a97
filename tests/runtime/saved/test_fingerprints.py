"""The fingerprint of a model says whether two models give the same results."""

import dataclasses
import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.runtime.saved.fingerprints import fingerprint_of_programs
from support import nets
from support.int8_models import compiled
from support.nets import Body


@pytest.mark.parametrize("net", [nets.Residual, nets.Linears, nets.ConvThenUnsupported, nets.Grouped])
def test_a_saved_and_loaded_model_has_the_same_fingerprint(net, tmp_path):
    model = compiled(net)[0]
    found = model.fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", found)
    model.save(tmp_path / "m")
    assert intaglio.load(tmp_path / "m").fingerprint() == found
    assert intaglio.load(tmp_path / "m", trust=True).fingerprint() == found


def test_the_instruction_set_does_not_count():
    model, lowered = compiled(nets.Residual)
    assert stages.compile(lowered, isa="portable").fingerprint() == model.fingerprint()


def test_one_weight_and_one_scale_count(tmp_path):
    model = compiled(nets.Residual)[0]
    graph, found = model.graph, {model.fingerprint()}
    name = next(name for name, array in graph.constants.items() if array.dtype.name == "int8")
    array = graph.constants[name].copy()
    array.flat[0] += 1
    changed = dataclasses.replace(graph, constants={**graph.constants, name: array})
    value, kind = next((name, kind) for name, kind in graph.types.items() if kind.q is not None)
    scaled = dataclasses.replace(kind, q=dataclasses.replace(kind.q, scale=tuple(2 * one for one in kind.q.scale)))
    for other in (changed, dataclasses.replace(graph, types={**graph.types, value: scaled})):
        model.graph = other
        found.add(model.fingerprint())
        model.graph = graph
    assert len(found) == 3


def test_a_tensor_of_a_float_island_counts():
    def with_island(offset: float) -> str:
        body = Body(lambda m, x: m.a(torch.special.zeta(m.a(x).abs() + 2, m.offset)), a=nn.Linear(4, 4))
        body.register_buffer("offset", torch.full((4,), offset))
        model = nets.randomize(body)
        model.offset.fill_(offset)
        return intaglio.quantize(model, [torch.ones(3, 4)], progress=False).fingerprint()

    assert with_island(2.0) == with_island(2.0) != with_island(2.5)


@pytest.mark.parametrize(("numbering", "digest"), [("tokens", "53510a3a1086c00d"), ("mask", "ef0ac880c4b93b4e")])
def test_models_of_several_programs_keep_the_digests_of_earlier_versions(numbering, digest):
    assert fingerprint_of_programs({"decoder": "b"}, numbering=numbering).startswith(digest)
    others = [fingerprint_of_programs({"decoder": "b"}, numbering=one) for one in (0, 1, None)]
    assert len({digest, *(one[:16] for one in others)}) == 4


def test_models_that_do_not_generate_keep_theirs_too():
    assert fingerprint_of_programs({"a": "b"}).startswith("73741e9b80508e54")
