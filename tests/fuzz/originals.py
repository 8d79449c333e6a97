"""The files that the driver `files` changes: saved models with their calls, and other files with what uses them."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fuzz import mutations
from intaglio import stages
from intaglio.codegen import emit
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.plan import CacheSizes, geometries, plan_graph, schedule_plan
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from intaglio.runtime import QuantizedModel
from intaglio.tune.schedule_cache import ScheduleCache
from support import nets
from support.project_files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from bits import images, sequences
from bits.cases import CASES, Case, levels_of, pictures, rows
from bits.flows import FLOWS

Calls = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
MODELS: dict[str, Case] = {
    "islands": CASES["islands"],  # float parts, a dictionary as result
    "cache": CASES["cache"],  # buffers
    "loop": CASES["loop"],  # a loop that Python drives, with a body of its own
    "lstm": CASES["lstm"],
    "recommender": CASES["recommender"],  # quantized tables
    "chains": CASES["chains"],  # loops over memory
    "packed": Case(partial(images.Perceptron, 32, 16, 4), rows(32), flow="dynamic",
                   options=levels_of(activations="float", weights_dtype="s4", weights="group:16")),
    "attention": Case(sequences.WrittenOut, rows(5, 32)),
    "written": Case(nets.InplaceMutations, pictures(3, 10)),
    "nested": Case(nets.MultiOutput, pictures(3, 10)),
}  # fmt: skip


# ---- saved models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A saved model: its bytes and members, calls, their results, and whether it contains a library."""

    name: str
    content: bytes
    members: dict[str, bytes]
    calls: Calls
    results: list[Any]
    library: bool


def models(folder: Path, isa: str | None = None, names: Sequence[str] = tuple(MODELS)) -> list[Model]:
    """Return saved models, each without its library and the first one with it, too."""
    found = []
    for name in names:
        case = MODELS[name]
        torch.manual_seed(0)
        calls = [(case.inputs(call), {}) for call in case.calls]
        for library in (False, True) if name == names[0] else (False,):
            model = compiled(case, isa)
            path = folder / name
            model.save(path, example=case.inputs(case.calibration[0]), library=library)
            results = [model(*cloned(args)) for args, _ in calls]
            content = path.read_bytes()
            found.append(Model(name, content, mutations.members_of(content), calls, results, library))
    return found


def compiled(case: Case, isa: str | None) -> QuantizedModel:
    """Return the int8 model of a case."""
    torch.manual_seed(0)
    model, batches = nets.randomize(case.net()).eval(), [case.inputs(call) for call in case.calibration]
    with torch.no_grad():
        reference, _ = FLOWS[case.flow](case, model, batches)
    return stages.compile(stages.requantize(reference), isa=isa)


def cloned(value: Any) -> Any:
    """Return arguments whose tensors the model may write to."""
    return copy.deepcopy(value)


def same(found: Any, expected: Any) -> bool:
    """Return whether two results have the same structure, types and bits."""
    leaves = [torch.utils._pytree.tree_flatten(value) for value in (found, expected)]
    if leaves[0][1] != leaves[1][1]:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(leaves[0][0], leaves[1][0], strict=True)
    )


# ---- other files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A file: its content, how it is changed, and what reads and uses it, which returns the kind of the result."""

    name: str
    content: Any
    change: Callable[[Any, random.Random], Any]
    use: Callable[[Any, Path], str]


def texts() -> list[Text]:
    """Return a file of parameters, recipes, ranges, schedules, and a state dictionary."""
    torch.manual_seed(0)
    model, batch = nets.randomize(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))), torch.randn(4, 6)
    recipe = Recipe.of({"0": {"method": "percentile:99.9", "rounding": "nearest"}, "type:Linear": {"bits": 7}})
    captured = stages.capture(model, batch)
    prepared = stages.prepare(captured, stages.Quantizer(recipe=recipe))
    ranges = stages.calibrate(prepared, [batch])
    reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, [batch]))
    parameters, whole = reference.parameters, recipe.with_parameters(reference.parameters)

    def use_parameters(content: bytes, folder: Path) -> str:
        read = Parameters.load(_written(content, folder))
        stages.convert(prepared, read)
        return "used"

    def use_recipe(content: bytes, folder: Path) -> str:
        read = Recipe.load(_written(content, folder, ".toml"))
        stages.prepare(captured, stages.Quantizer(recipe=read))
        return "used"

    def use_ranges(content: bytes, folder: Path) -> str:
        read = Ranges.load(_written(content, folder))
        stages.convert(prepared, read)
        read.merge(ranges)
        read.text()
        return "used"

    found = [
        Text("parameters", parameters.to_json().encode(), _change_json, use_parameters),
        Text("recipe", whole.to_toml().encode(), mutations.changed_bytes, use_recipe),
        Text("ranges", ranges.to_json().encode(), _change_json, use_ranges),
    ]
    return [*found, _schedules(stages.requantize(reference)), _state(stages.compile(stages.requantize(reference)))]


def _written(content: bytes, folder: Path, suffix: str = "") -> Path:
    path = folder / f"text{suffix}"
    path.write_bytes(content)
    return path


def _change_json(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return mutations.changed_bytes(content, draw)
    try:
        return mutations.json_bytes(mutations.changed_json(json.loads(content), draw))
    except (ValueError, RecursionError):
        return mutations.changed_bytes(content, draw)


def _schedules(lowered: Lowered) -> Text:
    """Return an entry of the schedule cache. A schedule that is read is used for a program."""
    plan, isa = plan_graph(lowered.graph), ISAS["portable"]
    value, geometry = next(iter(geometries(plan, {"n": 4}).items()))
    cache, sizes = ScheduleCache("portable", 1), CacheSizes()
    schedule = schedule_plan(plan, isa, sizes).schedules[value]
    entry = {"key": cache.key(geometry), "schedule": asdict(schedule)}

    def use(content: bytes, folder: Path) -> str:
        with mock.patch.object(ScheduleCache, "folder", folder):
            cache.path(geometry).write_bytes(content)
            read = cache.load(geometry)
        if read is None:
            return "ignored"
        emit(schedule_plan(plan, isa, sizes, {value: read}), "model").packed()
        return "used"

    return Text("schedule", json.dumps(entry).encode(), _change_json, use)


def _state(model: QuantizedModel) -> Text:
    """Return the state dictionary of a model. What is read is loaded into a copy."""
    state = model.state_dict()

    def change(content: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
        found = dict(content)
        name = draw.choice(sorted(found))
        if name == "graph" and draw.random() < 0.7:
            text = bytes(found[name].numpy())
            try:
                text = mutations.json_bytes(mutations.changed_json(json.loads(text), draw))
            except (ValueError, RecursionError):
                text = mutations.changed_bytes(text, draw)
            found[name] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
        else:
            mutations.change_tensor(found, name, draw)
        return found

    def use(content: dict[str, torch.Tensor], folder: Path) -> str:
        mine = copy.deepcopy(model)
        try:
            mine.load_state_dict(content)
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):  # of torch, for keys that are missing
                raise
            return "refused by torch"
        mine(torch.zeros(2, 6))
        return "used"

    return Text("state", state, change, use)
