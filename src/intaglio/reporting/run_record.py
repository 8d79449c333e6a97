"""The record that a report is repeated from: versions, machine, data, recipe and parameters."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import numpy as np
import torch

from intaglio import config
from intaglio.ir import Graph
from intaglio.native.cpu import cpu_name
from intaglio.reporting.report_data import RunRecord


def run_record(texts: Iterable[Mapping[str, str]], graphs: Iterable[Graph], samples: int, data: str) -> RunRecord:
    """Return the record of a report that is made now.

    Args:
        texts: stage texts of each graph of the model.
        graphs: integer graphs of the model.
        samples: number of samples that were compared.
        data: digest of their inputs.
    """
    found = list(texts)
    recipes = dict.fromkeys(one["quantizer"] for one in found if "quantizer" in one)
    parameters = [one["parameters"] for one in found if "parameters" in one]
    lines = [line for one in found for line in one.get("corrections", "").splitlines()]
    return RunRecord(
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={
            "intaglio": config.VERSION,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "Python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        samples=samples,
        data=data,
        recipe="\n".join(recipes),
        parameters=hashlib.sha256("".join(parameters).encode()).hexdigest() if parameters else "",
        weights=_digest_of(graphs),
        corrections=tuple(lines),
    )


def _digest_of(graphs: Iterable[Graph]) -> str:
    """Return the digest of the constants of integer graphs; "" without graphs."""
    digest, count = hashlib.sha256(), 0
    for graph in graphs:
        count += 1
        for name, array in sorted(graph.constants.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest() if count else ""
