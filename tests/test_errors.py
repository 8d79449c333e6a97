"""Remedies of errors about names."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import IntaglioError, did_you_mean
from support import nets
from support.int8_models import compiled


@pytest.mark.parametrize(
    ("value", "near"),
    [("nativ", "native"), ("avx512", "avx512vnni"), ("avx3", "avx2"), ("cuda", None), ("", None), (5, None)],
)
def test_the_nearest_allowed_name_is_proposed(value, near):
    names = ("native", "avx512vnni", "avx2", "portable")
    assert did_you_mean(value, names) == (near and f"did you mean {near!r}?")


MODEL, X = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
CALLS = {
    "'native'": lambda: stages.compile(compiled(nets.Linears)[1], backend="nativ"),
    "'integer'": lambda: compiled(nets.Linears)[0].text("integers"),
    "'avx512vnni'": lambda: stages.compile(compiled(nets.Linears)[1], isa="avx512"),
    "'portable'": lambda: compiled(nets.Linears)[0].export_c("folder", isa="portabl"),
    "'fallback'": lambda: intaglio.CompileOptions(on_new_shape="fallbak"),
    "'error'": lambda: setattr(compiled(nets.Linears)[0], "on_clipping", "errors"),
    "'minmax'": lambda: intaglio.Recipe.of({"*": {"method": "minmx"}}),
    "'channel'": lambda: intaglio.Recipe.of({"*": {"weights": "channels"}}),
    "'ignore'": lambda: stages.calibrate(stages.prepare(stages.capture(MODEL, X)), [X], nonfinite="ignor"),
}


@pytest.mark.parametrize("near", CALLS)
def test_misspelt_names_are_errors_with_the_nearest_one(near):
    with pytest.raises(IntaglioError) as caught:
        CALLS[near]()
    assert f"did you mean {near}?" in str(caught.value)
