"""Every public function, constructor and method checks its arguments, and keeps its signature and docstring."""

import inspect

import pytest

import intaglio
from intaglio import stages
from intaglio.argument_checks import annotation_checks
from support.public_names import public_callables, public_objects

MADE_BY_INTAGLIO = {
    "PartlyQuantizedModel",
    "annotation.Site",
    "calibration.CalibrationInfo",
    "eager.AutoQuantizationState",
    "eager.Intercepted",
    "eager.QTensorInfo",
    "eager.SeenOpInfo",
    "patterns.Call",
    "stages.Annotations",
    "stages.Captured",
    "stages.Corrections",
    "stages.Coverage",
    "stages.Lowered",
    "stages.OnnxFile",
    "stages.Planned",
    "stages.Prepared",
    "stages.Ranges",
    "stages.Reference",
}
"""Classes whose objects only intaglio makes: their constructors take what other stages return."""
CALLED_BY_OTHERS = {
    "PartlyQuantizedModel.train": "PyTorch calls it",
    "QuantizedModel.train": "PyTorch calls it",
    "stages.PreparedQat.set_extra_state": "PyTorch calls it",
    "annotation.Annotator.annotate": "users define it",
    "calibration.CalibrationCallback.calibrate": "users define it",
    "patterns.OpDef.strided_copies": "planning calls it",
    "patterns.OpDef.layout_of": "planning calls it",
}
CHECKED = {
    name: function for name, function in public_callables() if name not in {*MADE_BY_INTAGLIO, *CALLED_BY_OTHERS}
}


def is_default_of_a_field(name: str) -> bool:
    """Return whether a function is the default of a field of `OpDef`."""
    owner, _, field = name.rpartition(".")
    return owner == "patterns.OpDef" and field in intaglio.patterns.OpDef.__dataclass_fields__


@pytest.mark.parametrize("name", [name for name in CHECKED if not is_default_of_a_field(name)])
def test_a_public_function_checks_its_arguments(name):
    assert getattr(CHECKED[name], "checks_arguments", False), f"decorate {name} with check_arguments"


def test_exceptions_are_public_names():
    known = {name for name, _ in public_callables()}
    assert known >= {*CALLED_BY_OTHERS, *MADE_BY_INTAGLIO}


@pytest.mark.parametrize("name", CHECKED)
def test_annotations_of_checked_arguments_can_be_read(name):
    function = inspect.unwrap(CHECKED[name])
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.annotation, str):
            assert annotation_checks.expected(eval(parameter.annotation, function.__globals__)).text


def test_decorated_functions_keep_signature_and_docstring():
    assert list(inspect.signature(intaglio.quantize).parameters)[:2] == ["model", "data"]
    assert inspect.signature(intaglio.quantize).parameters["skip"].annotation == "Selectors | None"
    assert intaglio.quantize.__doc__.startswith("Quantize a float model")
    assert list(inspect.signature(intaglio.Setting).parameters)[:2] == ["quantize", "method"]


def test_public_modules_are_attributes_of_the_package():
    assert intaglio.patterns.builtin("conv2d")[0].name == "conv2d"
    assert intaglio.annotation.X86Quantizer().get_global() is None
    assert intaglio.calibration.DatasetManager([]).num_batches() == 0


FUNCTIONS_OF_STAGES = [name for name in stages.__all__ if name.islower() and name != "plan"]  # a package is plan too


@pytest.mark.parametrize("name", FUNCTIONS_OF_STAGES)
def test_functions_of_stages_are_named_where_they_are_missing(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; call intaglio\.stages\.{name}$"):
        getattr(intaglio, name)
    assert callable(getattr(intaglio.stages, name))


def test_every_public_object_is_found():
    names = dict(public_objects())
    assert {"quantize", "stages.capture", "eager.prepare", "patterns.op", "calibration.share"} <= names.keys()
