"""Changed files of every kind that intaglio reads: refused with an `IntaglioError`, or used without harm.

    python -m fuzz.files --count 100000 --seed 0               all cases (make fuzz-files)
    python -m fuzz.files --seed 0 --case 1234                  one case, in this process
    python -m fuzz.files --count 300 --sanitize                changed programs are compiled and run, too

Saved models are changed with and without new digests; parameters, recipes, ranges, schedules and state dictionaries are
changed as they are. A changed model that still loads runs with the compiled program if the program is the same, since
then only its float parts, signature and weights can differ. Other programs are only compiled with ``--sanitize``: for
the portable instruction set, with AddressSanitizer, which ends the process at an access outside of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

import intaglio
import intaglio.build
from fuzz import mutations, originals
from fuzz.isolated import Summary, TookTooLongError, isolated
from intaglio.errors import IntaglioError
from intaglio.ir import Program
from intaglio.runtime import Artifact, build_artifact
from intaglio.runtime.artifact import open_artifact, program_key

SECONDS = 20.0
"""Time limit of a case. The slowest sound ones take one second."""


class NotCompiledError(Exception):
    """Stands for the compilation of a program that no original has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only, in this process")
    parser.add_argument("--sanitize", action="store_true", help="compile changed programs, with AddressSanitizer")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.sanitize:
            run_with_sanitizer(Path(folder))
        driver = Driver(arguments.seed, Path(folder), arguments.sanitize)
        if arguments.case is not None:
            print(driver.run(arguments.case))
            return
        options = " --sanitize" * arguments.sanitize
        reproduce = f"PYTHONPATH=src:tests python -m fuzz.files --seed {arguments.seed} --case {{number}}{options}"
        summary = Summary("changed files", reproduce)
        for result in isolated(driver.run, arguments.first, arguments.count, SECONDS):
            summary.add(result)
        summary.show()
    sys.exit(bool(summary.failures))


def run_with_sanitizer(folder: Path) -> None:
    """Start this program again with AddressSanitizer preloaded, a compiler that uses it and a cache of its own, unless
    that is done. The library must be there before Python's, and that of C++ too, whose exceptions PyTorch throws."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    compiler = folder / "compiler"
    compiler.write_text(
        '#!/bin/sh\nunset LD_PRELOAD\nfor word; do shift; case "$word" in '
        '-Wl,--no-undefined|-O3) ;; *) set -- "$@" "$word";; esac; done\n'
        'exec g++ -O0 -fsanitize=address "$@"\n'
    )
    compiler.chmod(0o755)
    (folder / "cache").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "CXX": str(compiler),
        "INTAGLIO_CACHE_DIR": str(folder / "cache"),
    }
    sys.exit(subprocess.run([sys.executable, "-m", "fuzz.files", *sys.argv[1:]], env=environment).returncode)


class Driver:
    """Makes and runs cases by number. A case depends on the seed and its number only."""

    def __init__(
        self, seed: int, folder: Path, compiles: bool = False, names: Sequence[str] = tuple(originals.MODELS)
    ) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.seed, self.folder, self.compiles = seed, folder, compiles
        self.known: dict[str, Path] = {}
        with mock.patch.object(intaglio.build, "build_artifact", self._recorded):
            self.models = originals.models(folder, "portable" if compiles else None, names)
            self.texts = originals.texts()
        self._check_originals()

    def _check_originals(self) -> None:
        """Check that what is not changed is used, since a driver whose files are all refused would find nothing."""
        draw = random.Random(self.seed)
        for model in self.models:
            found = self._opened(mutations.sealed(model.members), model, draw, same_bits=True)
            assert found == "gives the same bits", f"{model.name}: {found}"
        for text in self.texts:
            assert text.use(text.content, self.folder) == "used", text.name

    def run(self, number: int) -> str:
        """Run a case and return the kind of its result. Raise whatever is not an `IntaglioError`."""
        draw = random.Random(f"{self.seed}/{number}")
        kinds: list[tuple[float, Callable[[random.Random], str]]] = [
            (0.0 if self.compiles else 0.35, self.damaged_model),
            (1.0 if self.compiles else 0.4, self.forged_model),
            (0.0 if self.compiles else 0.25, self.text),
        ]
        (chosen,) = draw.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            return chosen(draw)

    # -- saved models ----------------------------------------------------------------------------------------------

    def damaged_model(self, draw: random.Random) -> str:
        """Change bytes of a file and keep its digests."""
        original = draw.choice(self.models)
        content = original.content
        for _ in range(draw.randint(1, 3)):
            content = mutations.changed_bytes(content, draw)
        return f"damaged {self._opened(content, original, draw, same_bits=True)}"

    def forged_model(self, draw: random.Random) -> str:
        """Change members of a file and seal it again, so that the change reaches the checks of their contents."""
        original = draw.choice([model for model in self.models if not model.library])
        members = dict(original.members)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            mutations.change_members(members, draw, [model.members for model in self.models])
        return f"forged {self._opened(mutations.sealed(members), original, draw, same_bits=False)}"

    def _opened(self, content: bytes, original: originals.Model, draw: random.Random, same_bits: bool) -> str:
        path = self.folder / f"case-{os.getpid()}"
        path.write_bytes(content)
        trust = same_bits and draw.random() < 0.3
        isa = "portable" if self.compiles else None
        try:
            with self._compiler():
                model = intaglio.load(path, trust=trust, isa=isa)
        except IntaglioError:
            return "refused"
        except NotCompiledError:
            return "would be compiled"
        finally:
            path.unlink()
        results = []
        for call, (args, kwargs) in enumerate(original.calls):
            try:
                results.append(model(*originals.cloned(args), **originals.cloned(kwargs)))
            except IntaglioError:
                return "refused when it runs"
            except TookTooLongError:
                if not model.loops:
                    raise
                return "loops for as long as its condition says"
            except IndexError as error:
                if str(error) != "index out of range in self":  # the documented error of lookups
                    raise
                return "index out of range"
            if same_bits:
                assert originals.same(results[-1], original.results[call]), "another result"
        return "gives the same bits" if same_bits else "runs"

    @contextlib.contextmanager
    def _compiler(self) -> Iterator[None]:
        """Compile only what is compiled already, unless changed programs are to be compiled."""
        if self.compiles:
            yield
            return
        with mock.patch.object(intaglio.build, "build_artifact", self._known_only):
            yield

    def _recorded(self, program: Program) -> Artifact:
        artifact = build_artifact(program)
        self.known[program_key(program)] = artifact.path
        return artifact

    def _known_only(self, program: Program) -> Artifact:
        if (path := self.known.get(program_key(program))) is None:
            raise NotCompiledError
        return open_artifact(program, path)

    # -- other files -----------------------------------------------------------------------------------------------

    def text(self, draw: random.Random) -> str:
        """Change a file of parameters, ranges, schedules, a recipe or a state dictionary, and use what is read."""
        original = draw.choice(self.texts)
        content = original.content
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            content = original.change(content, draw)
        try:
            return f"{original.name} {original.use(content, self.folder)}"
        except IntaglioError:
            return f"{original.name} refused"


if __name__ == "__main__":
    main()
