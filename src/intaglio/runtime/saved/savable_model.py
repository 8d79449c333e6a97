"""Methods of a quantized model that write it to a file and check the results of a stored example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from intaglio import config
from intaglio.argument_checks import check_arguments
from intaglio.errors import ArtifactError, InputError
from intaglio.native.cpu import ISA_FLAGS
from intaglio.output_paths import check_file
from intaglio.runtime.float_islands import HostLoop, loops_in
from intaglio.runtime.program_module import ProgramModule
from intaglio.runtime.saved.fingerprints import fingerprint_of
from intaglio.runtime.saved.model_file import Example, SavedModel, copied_inputs, digest_of, exact_values, save
from intaglio.runtime.saved.saved_libraries import library_of, runtime_for
from intaglio.signature import initial_state


class SavableModel(ProgramModule):
    """A compiled program with methods that write files. `QuantizedModel` is the public subclass."""

    @check_arguments
    def save(self, path: str | Path, *, example: Any = None, library: bool = True) -> None:
        """Write the model to one file for `intaglio.load`. An existing file is replaced only once the new one is
        complete.

        Args:
            path: the file.
            example: arguments of one call (a tuple, a dictionary by name, or the only argument), which are stored with
                a digest of their results for `verify` (default: the example that the model has, if any).
            library: whether to store the compiled programs too, one for each instruction set, and the thread pool that
                they run on, for loading with ``trust=True``, which then needs no compiler.

        Raises:
            ArtifactError: the file cannot be written. An existing file is left unchanged.
        """
        check_file(path)
        stored = self.example
        if example is not None:
            tensors = copied_inputs(self.signature, example, self._byte_inputs)
            stored = Example(tensors, self._exact_digest(tensors))
        save(self._saved(stored, library), path, config.VERSION)

    def _saved(self, example: Example | None, library: bool, with_runtime: bool = True) -> SavedModel:
        """Return the contents of a file of this model, with the thread pool unless the file already has it."""
        program, libraries = self.artifact.program, {}
        if library:
            built = {**self.libraries, program.isa: library_of(program, self.artifact.library_bytes())}
            libraries = {isa: built[isa] for isa in ISA_FLAGS if isa in built}
        runtime = runtime_for(libraries) if with_runtime else None
        islands = {key: (module, self.island_dims[key]) for key, module in self.islands.items()}
        bodies = {name: loop.body._saved(None, library, False) for name, loop in self.loops.items()}
        return SavedModel(
            self.graph,
            self.signature,
            islands,
            self.coverage,
            self.model_info,
            libraries,
            example,
            self.schedules,
            self.on_new_shape,
            bodies,
            self.kept_attributes,
            runtime,
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 digest, as 64 hexadecimal digits, of what determines the model's results: its operators,
        weights, scales, float parts and the version of the arithmetic.

        A saved and loaded model has the same fingerprint on every machine, and a model with another weight or scale has
        a different one. Instruction sets, schedules, module names, source lines and plain attributes do not count, nor
        does the code of user-defined operators, which a model cannot read.

        Raises:
            ArtifactError: a float part of the model has no form that can be written.
        """
        islands = {key: (module, self.island_dims[key]) for key, module in self.islands.items()}
        bodies = {name: loop.body.fingerprint() for name, loop in self.loops.items()}
        return fingerprint_of(self.graph, islands, initial_state(self.signature), bodies)

    @property
    def loops(self) -> dict[str, HostLoop]:
        """Return the loops that Python drives because their number of iterations depends on data, by name. The body of
        each is a `QuantizedModel`."""
        return {name: loop for module in self.islands.values() for name, loop in loops_in(module).items()}

    def verify(self) -> None:
        """Run the example stored with the model and compare every integer result bit for bit.

        Results that depend on a float island are left out, because PyTorch's float operators differ between CPUs.

        Raises:
            ArtifactError: a bit differs.
            InputError: the model has no example.
        """
        if self.example is None:
            remedy = "store one with model.save(path, example=x) and load the file: intaglio.load(path).verify()"
            raise InputError("verify", None, "the model has no stored example", remedy=remedy)
        found = self._exact_digest(self.example.tensors)
        if found != self.example.digest:
            raise ArtifactError(
                "verify",
                None,
                f"the results of the stored example differ: their digest is {found[:16]} here "
                f"({self.artifact.program.isa}), and {self.example.digest[:16]} in the file",
                remedy="do not use this model on this machine, and report it: results must be the same everywhere",
            )

    def _exact_digest(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the digest of the results of a call that do not depend on a float island."""
        leaves = [tensor.clone() for tensor in tensors]
        with torch.no_grad():
            tensors = [*leaves, *initial_state(self.signature)]
            values = self._run(tensors, self._plan_for(leaves), torch.get_num_threads(), keep=True)
        exact = exact_values(self.graph)
        names = [*self._written, *self._outputs]
        return digest_of(values, [name for name in dict.fromkeys(names) if name in exact])
