"""`load`: the models in files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from intaglio.argument_checks import check_arguments
from intaglio.build import open_model
from intaglio.ops import OpDef, checked_records
from intaglio.runtime.saved.archive import GENERATOR_ENTRY, read


@check_arguments
def load(path: str | Path, *, trust: bool = False, isa: str | None = None, operators: Iterable[OpDef] = ()) -> Any:
    """Load a model that its method ``save`` wrote.

    Nothing is unpickled, and nothing is imported, except for ``transformers`` if the file holds one of its models that
    generates. The program is built from the integer graph, unless the cache has it. A tuned model keeps its schedules.

    Args:
        path: the file.
        trust: use the compiled library in the file if it was built from the source text of this version, by default the
            best one that this machine supports. It is native code, so only trust files whose origin you know.
        isa: instruction set (default: the best one that this machine supports).
        operators: records of user-defined operators, which files cannot hold: those that the `Quantizer` had.

    Returns:
        The int8 model, which is called like the float model: a `QuantizedModel`, or the model with ``generate`` and a
        cache that was saved.

    Raises:
        ArtifactError: the file is not valid, or has user-defined operators that are not given.
        BuildError: the compilation fails, or this machine does not support the instruction set.

    Examples:
        >>> int8.save("model.int8")
        >>> int8 = intaglio.load("model.int8")
    """
    records, contents = checked_records(operators), read(Path(path))
    if GENERATOR_ENTRY in contents[0]:
        from intaglio.integrations.transformers import opened_generator

        return opened_generator(Path(path), contents, trust=trust, isa=isa, operators=records)
    return open_model(path, contents, trust=trust, isa=isa, operators=records)
