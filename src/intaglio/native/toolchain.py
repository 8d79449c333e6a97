"""The C++ compiler of this machine: `g++`, `clang++`, or the clang inside of the Python package `ziglang`.

Only libc is linked. A machine without a compiler package also lacks its headers and the linker's view of libc: for
`ziglang`, the headers are those of the package, and programs are linked with the libc that this process runs on.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from intaglio import config
from intaglio.errors import BuildError

NO_COMPILER = (
    "install g++ or clang (Debian, Ubuntu: apt install g++), or install one with pip install 'intaglio[compiler]', or "
    "set CXX to the path of a C++ compiler"
)

# g++ contracts a*b+c into one rounding, even written as intrinsics, unless told not to; AVX-512 flags imply FMA.
COMPILE_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    # Without this, g++ 12 mistakes an address that was split into integers for a null pointer, concludes that the
    # function writes nothing, and removes calls of it.
    "-fno-delete-null-pointer-checks",
)
# Only libc is linked and nothing may stay undefined: a call into libstdc++ or libm is an error when building, with
# every compiler. (libpthread is empty since glibc 2.34.)
LINK_FLAGS = ("-nodefaultlibs", "-Wl,--no-undefined", "-Wl,--gc-sections", "-lpthread", "-lc", "-lgcc")
LLD_FLAGS = ("-shared", "--no-undefined", "--gc-sections", "--as-needed", "--eh-frame-hdr", "--hash-style=gnu")
"""Flags of LLVM's linker that mean what `COMPILE_FLAGS` and `LINK_FLAGS` mean for the linking of g++."""

# Headers in folders of `ziglang` by the machine's name, the most specific first. Names differ between its versions.
ZIG_HEADERS = ("{0}-linux-gnu", "generic-glibc", "{0}-linux-any", "any-linux-any")
ZIG_DEFINITIONS = ("-nostdinc", "-DINTAGLIO_SHARED_LIBC")
"""Only the package's headers, and no functions of the static part of libc, which development packages install."""
ZIG_NAMES = {"x86_64": ("x86_64", "x86"), "aarch64": ("aarch64",)}
LIBC = re.compile(r"/(lib(c|pthread)|ld)[-.][^/]*$")
"""Paths of the libraries that glibc consists of, as far as programs call them."""


@dataclass(frozen=True)
class Toolchain:
    """Commands that make a shared object.

    Attributes:
        path: Path of the compiler.
        frontend: Beginning of every command that compiles or assembles.
        linker: Beginning of the command that links, with its flags.
        libraries: End of the command that links.
        links_sources: Whether the command that links compiles C++ too.
    """

    path: str
    frontend: tuple[str, ...]
    linker: tuple[str, ...]
    libraries: tuple[str, ...]
    links_sources: bool

    def compile_command(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the beginning of the command that compiles a C++ file to an object file, with flags of an instruction
        set."""
        return (*self.frontend, *(flag for flag in COMPILE_FLAGS if flag != "-shared"), *flags, "-c")

    def link_command(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the beginning of the command that links object files."""
        return (*self.linker, *COMPILE_FLAGS, *flags) if self.links_sources else self.linker

    def key(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return everything about the compiler, the linker and their flags that a compiled file depends on."""
        return (
            *self.frontend,
            *COMPILE_FLAGS,
            *flags,
            *self.linker,
            *self.libraries,
            version_of(self),
            linker_version_of(self),
        )


def find_toolchain(name: str) -> Toolchain:
    """Return the commands of the compiler that `config.compiler` finds.

    Args:
        name: What is compiled, for the error.

    Raises:
        BuildError: No compiler is found.
    """
    path = config.compiler()
    if path is None:
        chosen = os.environ.get("CXX")
        found = "no C++ compiler is found (CXX, g++, c++, clang++, and the Python package ziglang)"
        problem = f"CXX is {chosen!r}, which is not a program" if chosen else found
        raise BuildError(name, None, problem, remedy=NO_COMPILER)
    if Path(path).name == "zig":
        return _zig_toolchain(path)
    return Toolchain(path, (path,), (path,), LINK_FLAGS, links_sources=True)


@cache
def version_of(toolchain: Toolchain) -> str:
    """Return the compiler's version text. Raise `BuildError` if the compiler does not run."""
    return _version((*toolchain.frontend, "--version"), toolchain)


@cache
def linker_version_of(toolchain: Toolchain) -> str:
    """Return the version text of a linker that is a command of its own, and an empty string if the compiler links.

    Raises:
        BuildError: the linker does not run.
    """
    return "" if toolchain.links_sources else _version((*toolchain.linker, "--version"), toolchain)


def _version(command: tuple[str, ...], toolchain: Toolchain) -> str:
    """Return what a command prints. Raise `BuildError` if it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"the compiler does not run: {error}"
        raise BuildError(toolchain.path, None, problem, remedy=NO_COMPILER) from error


@cache
def _zig_toolchain(path: str) -> Toolchain:
    """Return the commands of the clang and the linker inside of a ``zig`` program.

    The compiler driver of zig itself is not used: it detects the CPU, switches on a sanitizer, and compiles libraries
    for a minute that no program here needs.

    Raises:
        BuildError: The program lacks its folder of headers.
    """
    headers, machine = Path(os.path.realpath(path)).parent / "lib", platform.machine()
    folders = [headers / "include"]
    for pattern in ZIG_HEADERS:
        names = ZIG_NAMES.get(machine, (machine,))
        candidates = [headers / "libc" / "include" / pattern.format(name) for name in names]
        folders += [folder for folder in candidates if folder.is_dir()][:1]
    if len(folders) < len(ZIG_HEADERS) + 1:
        problem = f"it has no C headers for {machine} in {headers}"
        raise BuildError(path, None, problem, remedy="install the Python package: pip install 'intaglio[compiler]'")
    frontend = (path, "clang", f"--target={machine}-linux-gnu", *ZIG_DEFINITIONS, f"-D__GLIBC_MINOR__={_glibc_minor()}")
    includes = tuple(part for folder in folders for part in ("-isystem", str(folder)))
    return Toolchain(path, (*frontend, *includes), (path, "ld.lld", *LLD_FLAGS), _libc_files(), links_sources=False)


def _glibc_minor() -> int:
    """Return the second number of the version of glibc that this process runs on, 28 if it is not known."""
    found = re.fullmatch(r"2\.(\d+).*", platform.libc_ver()[1])
    return int(found[1]) if found else 28


def _libc_files() -> tuple[str, ...]:
    """Return the paths of the libraries of glibc that this process has loaded."""
    with Path("/proc/self/maps").open() as lines:
        paths = [line.split(maxsplit=5)[-1].strip() for line in lines]
    return tuple(dict.fromkeys(path for path in paths if LIBC.search(path)))
