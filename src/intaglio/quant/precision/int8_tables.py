"""Choice of the embedding tables that are int8 because they cost little in the results of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from intaglio.fxgraph.padding_masks import padded_axes_of, visible_tokens
from intaglio.ir import DType
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.precision.changed_run import ChangedRun, Changes
from intaglio.quant.precision.measure_rounding import (
    MEASURED_SAMPLES,
    Power,
    add_power,
    first_samples,
    ranges_of,
    rounded,
    visible_values,
)
from intaglio.quant.recipes.choices import Role

MOST_DECIBELS = 0.05
"""Signal-to-noise ratio that all int8 tables together may cost in each result of the model."""
LEAST_SHARE = 0.001
"""Share of the bytes of all parameters below which a table is not worth the runs that measure its rounding."""
LEAST_VALUES = 1024
"""Number of values of each result in which noise is measured; its power is then known to a few percent."""
LEAST_SAMPLES = 2
"""Number of samples in which noise is measured at least."""


def int8_tables(prepared: Prepared, calls: Calls, group: Group) -> dict[str, float]:
    """Return the tables whose rounding adds little to the noise of all other quantization, largest first.

    Tables of less than `LEAST_SHARE` of the parameters stay in float.

    The noise of a table is that of the float model with this table rounded. The other noise is that of the float model
    with all activations and weights rounded to nearest, so that a table is chosen only if it costs little in int8.

    Args:
        prepared: the prepared model, equalized.
        calls: the tensors of each call on this rank.
        group: the ranks.

    Returns:
        Name of an embedding's value -> what its table costs, in decibels.
    """
    annotations = prepared.annotations
    least = LEAST_SHARE * sum(values.nbytes for values in annotations.module.buffers())
    undecided = [
        node
        for node in _undecided(annotations)
        if getattr(annotations.module, str(node.args[0].target)).nbytes >= least
        and not _has_float_readers(node.args[0], annotations)
    ]
    results = [node for node in annotations.module.graph.output_node().all_input_nodes if node.op != "placeholder"]
    if not undecided or not results:
        return {}
    some = first_samples(calls, group, _sample_count(results))
    tables: dict[str, list[fx.Node]] = {}
    for node in undecided:
        tables.setdefault(str(node.args[0].target), []).append(node)
    runs: dict[str | None, Changes] = {None: _all_rounding(prepared, some, group)}
    runs |= {name: _table_rounding(nodes) for name, nodes in tables.items()}
    noise = _noise(prepared, results, runs, some, group)
    found, total, names = dict[str, float](), [0.0] * len(results), ValueNames(annotations.module.graph)
    for table in sorted(tables, key=lambda name: -getattr(annotations.module, name).numel()):
        shares = [_share(own, other) for own, other in zip(noise[table], noise[None], strict=True)]
        after = [before + share for before, share in zip(total, shares, strict=True)]
        if all(_decibels(share) <= MOST_DECIBELS for share in after):
            found |= {names.of(node): _decibels(max(shares)) for node in tables[table]}
            total = after
    return found


def _sample_count(results: list[fx.Node]) -> int:
    """Return how many samples have enough values of each result; axes of variable size count as one value."""
    types = [kind for node in results if (kind := tensor_type(node)) is not None and kind.dtype is DType.F32]
    least = min((math.prod(size for size in kind.shape[1:] if isinstance(size, int)) for kind in types), default=1)
    return min(MEASURED_SAMPLES, max(LEAST_SAMPLES, -(-LEAST_VALUES // max(least, 1))))


def _undecided(annotations: Annotations) -> list[fx.Node]:
    """Return the embeddings whose tables the data decides about."""
    return [table.node for table in annotations.tables if table.undecided]


def _has_float_readers(table: fx.Node, annotations: Annotations) -> bool:
    """Return whether operators besides embeddings and int8 layers read a table, which is then stored in float too."""
    constants = [
        node for node in annotations.module.graph.nodes if node.op == "get_attr" and node.target == table.target
    ]
    known = {*_undecided(annotations), *(region.anchor for region in annotations.regions)}
    return any(reader not in known for node in constants for reader in node.users)


def _share(noise: float, other: float) -> float:
    """Return noise as a share of other noise."""
    return noise / other if other else math.inf if noise else 0.0


def _decibels(share: float) -> float:
    """Return what noise costs whose power is a share of that of the noise without it."""
    return 10 * math.log10(1 + share)


def _all_rounding(prepared: Prepared, calls: Calls, group: Group) -> Changes:
    """Return the rounding of the activations and weights of a model to nearest."""
    annotations = prepared.annotations
    nodes = {node.name: node for node in annotations.module.graph.nodes}
    sites = [site for site in annotations.sites if site.role is Role.ACTIVATION and site.value in nodes]
    ranges = ranges_of(prepared, sites, calls, group)
    changes: dict[fx.Node, Callable[[torch.Tensor], torch.Tensor]] = {
        nodes[site.value]: partial(rounded, extrema=ranges[site.name], site=site)
        for site in sites
        if ranges[site.name][0] < ranges[site.name][1]
    }
    weights = [site for site in annotations.sites if site.role is Role.WEIGHT and site.value in nodes]
    return {**changes, **{nodes[site.value]: partial(_rounded_weight, most=site.qmax) for site in weights}}


def _rounded_weight(weight: torch.Tensor, most: int) -> torch.Tensor:
    """Return a weight rounded to ``most`` steps on each side of zero, with a scale for each output channel."""
    rows = weight.flatten(1) if weight.dim() > 1 else weight[None]
    steps = (rows.abs().amax(1, keepdim=True) / most).clamp_min(torch.finfo(rows.dtype).tiny)
    return (numerics.round_clamp(rows / steps, -most, most) * steps).reshape(weight.shape)


def _table_rounding(nodes: list[fx.Node]) -> Changes:
    """Return the rounding of a table. Rows that were looked up are rounded like the rows of the table; the rows that an
    embedding bag adds up are rounded in the table, which other operators rarely read."""
    return {node if operator(node) == EMBEDDING_TARGET else node.args[0]: _rounded_rows for node in nodes}


def _rounded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table as int8 gives them back."""
    flat = rows.detach().reshape(-1, rows.shape[-1]).numpy()
    if not flat.size:
        return rows
    quantized, scales, zeros = numerics.quantize_table(flat)
    return torch.from_numpy((quantized - zeros[:, None]) * scales[:, None]).to(rows.dtype).reshape(rows.shape)


def _noise(
    prepared: Prepared, results: list[fx.Node], runs: Mapping[str | None, Changes], calls: Calls, group: Group
) -> dict[str | None, list[float]]:
    """Return the power of the noise in each result that changes make, over the data of all ranks without padding."""
    module, signature = prepared.annotations.module, prepared.signature
    powers = {name: [Power() for _ in results] for name in runs}
    padded = padded_axes_of(module, {node.name for node in results}, signature)

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for leaves in calls:
                visible = partial(visible_values, padded, visible_tokens(signature, leaves))
                exact = ChangedRun(module, results, {}).results(leaves)
                for name, changes in runs.items():
                    found = ChangedRun(module, results, changes).results(leaves)
                    for power, node, before, after in zip(powers[name], results, exact, found, strict=True):
                        if isinstance(before, torch.Tensor) and before.is_floating_point():
                            add_power(power, visible(node.name, before), visible(node.name, after))

    group.run_on_all_ranks(run)
    gathered = group.gather(powers)
    return {
        name: [math.fsum(x for rank in gathered for x in rank[name][place].noise) for place in range(len(results))]
        for name in runs
    }
