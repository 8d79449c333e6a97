"""Names, source paths and texts with any characters that are saved can be loaded."""

from dataclasses import replace
from functools import cache

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from intaglio.codegen.program import comment_text
from intaglio.ir import Constants, Graph, Origin
from intaglio.runtime.saved.archive import from_json, to_json
from intaglio.runtime.saved.json_codec import NotStorableError, ParameterTable, decode_graph, encode_graph
from support import nets
from support.lowering import quantized

TEXTS = st.one_of(st.text(max_size=20), st.text("\\\n\r\0\"'*/?\u2028\ud800 a", max_size=8))
ODD = 'a\\\n\r\0"*/\u2028\udcff?>'


@cache
def integer_graph() -> Graph:
    model = nets.randomize(nets.Linears())
    return quantized(model, nets.example(model, 4))[1].graph


@given(TEXTS, TEXTS, TEXTS)
@example("path", "aten.x", "srcs/back\\slash.py:3 in forward")
@example(ODD, ODD, ODD)
def test_origins_of_any_text_are_loaded_as_they_were_saved(path, operator, source):
    origin = Origin(path, operator, source)
    graph = integer_graph()
    graph = replace(graph, ops=tuple(replace(op, origin=origin) for op in graph.ops))
    parameters, arrays = ParameterTable(), dict[str, np.ndarray]()
    written = to_json(encode_graph(graph, parameters, arrays))
    found = decode_graph(from_json(written), ParameterTable(parameters.array()), Constants(arrays))
    assert {op.origin for op in found.ops} == {origin}


@given(TEXTS)
def test_attributes_are_refused_when_they_are_saved_or_loaded_as_they_were(text):
    graph = integer_graph()
    graph = replace(graph, ops=tuple(replace(op, attrs={**op.attrs, "text": text}) for op in graph.ops))
    parameters, arrays = ParameterTable(), dict[str, np.ndarray]()
    try:
        written = to_json(encode_graph(graph, parameters, arrays))
    except NotStorableError:
        return
    found = decode_graph(from_json(written), ParameterTable(parameters.array()), Constants(arrays))
    assert [op.attrs for op in found.ops] == [op.attrs for op in graph.ops]


@given(TEXTS)
def test_comments_stay_one_line(text):
    found = comment_text(text)
    assert found.isprintable()
    assert "\\" not in found
