"""Models as C: built by a plain compiler and by CMake, run without Python, equal to the bit; and what is refused."""

import ctypes
import filecmp
import mmap
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, BuildError, UnsupportedError
from intaglio.runtime import QuantizedModel
from intaglio.runtime.calls import threads
from support import exported_c as c
from support import nets
from support.exported_c import Exported, Library, build, exported
from support.int8_models import assert_same, compiled, picture
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize
from support.slow_params import slow_params_except

X = picture(3)


@pytest.fixture(scope="module")
def residual(tmp_path_factory) -> Path:
    """`nets.Residual`, for all instruction sets of this machine, sharing steps among threads however small they are."""
    folder = tmp_path_factory.mktemp("residual")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("START_SECONDS", "BARRIER_SECONDS", "BARRIER_SECONDS_PER_THREAD"):
            patch.setattr(threads, name, 0.0)
        compiled(nets.Residual)[0].export_c(folder, isa=RUNNABLE_ISAS)
    build(folder)
    return folder


def opened(folder: Path) -> Exported:
    return Exported(Library(next(folder.glob("lib*.so"))), folder / "weights.bin")


@cache
def block() -> QuantizedModel:
    """A table of tokens and a transformer block; batch and length are free."""

    def body(m: nn.Module, ids: Tensor) -> Tensor:
        x = m.table(ids)
        q, k, v = (layer(m.first(x)).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        x = x + m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + m.narrow(F.gelu(m.wide(m.second(x))))

    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    norms = {name: nn.LayerNorm(16) for name in ("first", "second")}
    others = {"wide": nn.Linear(16, 32), "narrow": nn.Linear(32, 16), "table": nn.Embedding(50, 16)}
    model = randomize(Body(body, **parts, **norms, **others))
    return intaglio.quantize(model, [torch.randint(50, (4, 9))], progress=False)


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_a_convolutional_network_has_the_bits_of_the_python_call_at_every_batch(residual):
    model, found = compiled(nets.Residual)[0], opened(residual)
    for batch in (1, 2, 5, 0, 3, 1):
        for count in (1, 2, 0):
            assert_same(found(picture(batch, batch), threads=count), [model(picture(batch, batch))])


@pytest.mark.slow(reason="exports a network for one set of instructions")
@pytest.mark.parametrize(
    "isa",
    slow_params_except(
        "portable", of=RUNNABLE_ISAS, reason="the best set is chosen of several, and runs the residual network"
    ),
)
def test_every_instruction_set_alone_has_the_same_bits(isa, tmp_path):
    found = exported(compiled(nets.ConvBnRelu)[0], tmp_path, isa)
    assert found.library.isa(found.handle) == isa.encode()
    assert_same(found(X), [compiled(nets.ConvBnRelu)[0](X)])


def test_the_best_instruction_set_of_several_is_chosen_when_it_runs(residual):
    found = opened(residual)
    assert found.library.isa(found.handle) == RUNNABLE_ISAS[0].encode()


@pytest.mark.slow(reason="compiles a large model; smaller ones have free sizes and lookups, too")
@pytest.mark.parametrize(
    "isa",
    [
        RUNNABLE_ISAS[0],
        pytest.param(
            "portable",
            marks=pytest.mark.slow(reason="a second compiler run of a large model; smaller ones run on all sets"),
        ),
    ],
)
def test_a_transformer_block_has_the_bits_of_the_python_call_at_every_length(isa, tmp_path):
    model = block()
    found = exported(model, tmp_path, isa)
    for batch, length in ((1, 1), (2, 7), (1, 40), (3, 5)):
        ids = torch.randint(50, (batch, length))
        assert_same(found(ids), [model(ids)])


@pytest.mark.slow(reason="exports a model that takes bytes")
def test_images_are_read_in_any_strides_and_element_type(tmp_path):
    image = intaglio.Image(0.5, 0.5)
    model = intaglio.quantize(randomize(nets.ConvBnRelu()), [X], input=image, progress=False)
    found, q_values = exported(model, tmp_path), (X * 64 + 128).clamp(0, 255).to(torch.uint8)
    for x in (
        X,
        X.contiguous(memory_format=torch.channels_last),
        X.flip(3).transpose(2, 3),
        q_values,
        q_values.contiguous(memory_format=torch.channels_last),
    ):
        assert_same(found(x), [model(x).contiguous()])


class Shapes(nn.Module):
    """Ids, images of one and three axes, and a mask; a dictionary of results of one to five axes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line, self.volume = nn.Embedding(9, 6), nn.Conv1d(6, 4, 3), nn.Conv3d(2, 3, 2)
        self.plane = nn.Conv2d(2, 5, 3)

    def forward(self, ids: Tensor, volume: Tensor) -> dict[str, Tensor | list[Tensor]]:
        line = self.line(self.table(ids).transpose(1, 2))
        plane = self.plane(volume[:, :, 0])
        return {"line": line, "both": [self.volume(volume), plane], "mean": line.mean(2).mean(1), "again": plane}


@pytest.mark.slow(reason="exports another model, with results of many ranks")
def test_results_of_any_rank_and_nesting_are_dense_and_named(tmp_path):
    ids, volume = torch.randint(9, (2, 8)), torch.randn(2, 2, 4, 6, 5)
    model = intaglio.quantize(randomize(Shapes()), [(ids, volume)], progress=False)
    found = exported(model, tmp_path)
    names = [found.library.output(i).contents.name.decode() for i in range(found.library.outputs())]
    assert names == ["line", "both.0", "both.1", "mean", "again"]
    for n in (2, 1, 4):
        ids, volume = torch.randint(9, (n, 8)), torch.randn(n, 2, 4, 6, 5)
        expected = model(ids, volume)
        assert_same(found(ids, volume), [expected["line"], *expected["both"], expected["mean"], expected["again"]])
        assert_same(
            found(ids.t().contiguous().t(), volume.transpose(2, 3).contiguous().transpose(2, 3)),
            [expected["line"], *expected["both"], expected["mean"], expected["again"]],
        )
    assert found.run([ids + 9, volume], found.outputs()) == c.INDEX
    assert_same(found(ids, volume), found(ids, volume))


def test_a_loaded_model_exports_the_same_files(tmp_path):
    model = compiled(nets.Residual)[0]
    model.save(tmp_path / "model.intaglio")
    loaded = intaglio.load(tmp_path / "model.intaglio")
    for one, folder in ((model, tmp_path / "a"), (loaded, tmp_path / "b"), (loaded, tmp_path / "b")):
        one.export_c(folder, isa=("portable", *RUNNABLE_ISAS))
    compared = filecmp.dircmp(tmp_path / "a", tmp_path / "b")
    kernels = compared.subdirs["kernels"]
    different = [d.left_only + d.right_only + d.diff_files for d in (compared, kernels)]
    assert different == [[], []]
    assert len(kernels.common) > len(RUNNABLE_ISAS)


# ---- building -------------------------------------------------------------------------------------------------------


def test_libraries_of_c_alone_are_linked_and_all_names_are_the_networks_own(residual):
    (path,) = residual.glob("lib*.so")
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed
    assert {name.split(".")[0] for name in needed} <= {"libc", "libm", "libpthread", "ld-linux-x86-64"}
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True).stdout.split("\n")
    assert {line.split()[-1].partition("_")[0] for line in symbols if line} == {"residual"}


@pytest.mark.slow(reason="two exports and a link of ten seconds")
def test_two_networks_are_linked_into_one_program(tmp_path):
    for name, net in (("a", nets.Residual), ("b", nets.ConvBnRelu)):
        compiled(net)[0].export_c(tmp_path / name)
        build(tmp_path / name)
    main = "int main(void) { return residual_abi() - convbnrelu_abi(); }"
    (tmp_path / "both.c").write_text(f'#include "a/residual.h"\n#include "b/convbnrelu.h"\n{main}')
    line = "gcc -Wall -Werror -std=c99 -pthread both.c a/*.o b/*.o -o both && ./both"
    subprocess.run(["sh", "-ec", line], cwd=tmp_path, check=True)


def build_main(folder: Path, compiler: str = "gcc") -> Path:
    """Export `nets.ConvBnRelu`, and build its main by the commands of README.txt."""
    compiled(nets.ConvBnRelu)[0].export_c(folder)
    lines = [line.replace("gcc", compiler) for line in c.commands(folder)]
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def main_folder(tmp_path_factory) -> Path:
    return build_main(tmp_path_factory.mktemp("main"))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_commands_of_the_readme_build_main_and_it_prints_the_results(compiler, main_folder, tmp_path_factory):
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    folder = main_folder if compiler == "gcc" else build_main(tmp_path_factory.mktemp("main"), compiler)
    assert main_prints(compiled(nets.ConvBnRelu)[0], folder / "convbnrelu", folder)


@pytest.mark.slow(reason="runs CMake; the commands of the README build the same files")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(
    "shared", ["ON", pytest.param("OFF", marks=pytest.mark.slow(reason="CMake again, for a static library"))]
)
def test_cmake_builds_main_and_it_prints_the_results(shared, tmp_path):
    model = compiled(nets.ConvBnRelu)[0]
    model.export_c(tmp_path)
    for line in (f"cmake -S . -B build -DBUILD_SHARED_LIBS={shared}", "cmake --build build"):
        subprocess.run(line.split(), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert main_prints(model, tmp_path / "build" / "convbnrelu_main", tmp_path)


def main_prints(model: QuantizedModel, program: Path, folder: Path) -> bool:
    (folder / "x.bin").write_bytes(X.numpy().tobytes())
    run = [program, "weights.bin", str(len(X)), "x.bin"]
    printed = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout
    head, _, numbers = printed.strip().partition(": ")
    assert head.startswith("output [n, ")
    found = torch.tensor([float(number) for number in numbers.split()])
    return torch.equal(found, model(X).flatten()[:8])


def test_the_exported_main_is_short_and_reports_errors(main_folder):
    assert len((main_folder / "main.c").read_text().splitlines()) <= 40
    for arguments, said in (
        ((), ""),
        (("gone",), "open: the file"),
        (("main.c",), "open: these are not the weights"),
        (("weights.bin", "-1"), "resize: the network does not take these sizes"),
        (("weights.bin", "1", "gone"), "gone:"),
    ):
        command = [main_folder / "convbnrelu", *arguments]
        ended = subprocess.run(command, cwd=main_folder, capture_output=True, text=True)
        assert ended.stderr.startswith(said)
        assert ended.returncode == bool(said)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_files_that_are_not_its_weights_are_refused(residual, tmp_path):
    library, handle = opened(residual).library, c.P()
    content = (residual / "weights.bin").read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    foreign = bytearray(content)
    foreign[16] ^= 1
    cases = {
        **dict.fromkeys((b"", b"intaglio", b"x" * 4096, bytes(foreign)), c.FOREIGN),
        **dict.fromkeys((content[:-64], content + bytes(64), bytes(damaged)), c.DAMAGED),
        content: c.OK,
    }
    for bytes_, status in cases.items():
        (tmp_path / "weights.bin").write_bytes(bytes_)
        assert library.open(str(tmp_path / "weights.bin").encode(), ctypes.byref(handle)) == status
        assert bool(handle) is (status == c.OK)
    assert library.open(str(tmp_path / "gone").encode(), ctypes.byref(handle)) == c.FILE
    assert library.open(str(tmp_path).encode(), ctypes.byref(handle)) == c.FILE


def test_weights_in_memory_must_be_aligned_to_64_bytes(residual):
    model, library = compiled(nets.Residual)[0], opened(residual).library
    content = (residual / "weights.bin").read_bytes()
    memory = mmap.mmap(-1, len(content) + 64)
    memory[64 : 64 + len(content)] = content
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = Exported(library, residual / "weights.bin")
    library.close(found.handle)
    assert library.open_memory(start + 32, len(content), ctypes.byref(found.handle)) == c.ARGUMENT
    assert library.open_memory(start + 64, len(content), ctypes.byref(found.handle)) == c.OK
    assert_same(found(X), [model(X)])


def test_null_pointers_and_missing_indices_are_errors(residual):
    found = opened(residual)
    library, handle = found.library, found.handle
    assert library.open(None, ctypes.byref(c.P())) == library.open(b"x", None) == c.ARGUMENT
    assert {library.resize(*given) for given in ((None, None), (handle, None), (handle, (c.P * 1)()))} == {c.ARGUMENT}
    assert not any((library.input(1), library.input(-1), library.output(7)))
    assert library.run(handle, None, None, 1) == library.read_as(handle, 0, 9, None) == c.UNPLANNED
    assert not library.output_sizes(handle, 0)
    assert library.output_bytes(handle, 0) == library.input_bytes(handle, 0) == 0
    assert found.resize([X.shape]) == c.OK
    assert library.run(handle, None, None, 1) == library.run(handle, (c.P * 1)(), (c.P * 1)(), 1) == c.ARGUMENT
    assert found.run([X], found.outputs(), threads=-1) == c.ARGUMENT
    assert library.read_as(handle, 1, 9, None) == library.read_as(handle, 0, 1, None) == c.ARGUMENT
    assert library.read_as(handle, 0, 99, None) == c.ARGUMENT
    assert library.isa(None) is None
    library.close(None)
    for status in range(-1, 12):
        assert library.error(status)


def test_sizes_that_are_refused_leave_the_plan_as_it_was(residual):
    model, found = compiled(nets.Residual)[0], opened(residual)
    assert found.resize([X.shape]) == c.OK
    wrong = ((3, 4, 12, 12), (3, 3, 11, 12), (-1, 3, 12, 12), (2**40, 3, 12, 12), (2**62, 3, 12, 12))
    assert {found.resize([shape]) for shape in wrong} == {c.SHAPE}
    assert found.resize([(2**31 - 1, *X.shape[1:])]) in (c.MEMORY, c.SHAPE)
    outputs = found.outputs()
    assert found.run([X], outputs) == c.OK
    assert_same(outputs, [model(X)])


@pytest.mark.slow(reason="exports a model with free sizes; other sizes are refused above")
def test_sizes_too_small_for_a_window_are_refused(tmp_path):
    net = Body(lambda m, x: m.c(x), c=nn.Conv2d(3, 4, 3, stride=2))
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    captured = stages.capture(randomize(net), (picture(),), dynamic_shapes=((sizes,),))
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [picture()], progress=False))
    model = stages.compile(stages.requantize(reference))
    found = exported(model, tmp_path)
    for size in (3, 4, 17):
        assert_same(found(picture(2, size=size)), [model(picture(2, size=size))])
    for size in (2, 1, 0):
        with pytest.raises(intaglio.errors.InputError):
            model(torch.zeros(2, 3, size, 9))
        assert found.resize([(2, 3, size, 9)]) == c.SHAPE


class Upright(nets.ConvBnRelu):
    """Turns images that are wider than high."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(2, 3) if x.shape[2] < x.shape[3] else x)


@pytest.mark.slow(reason="exports a model with free sizes; other sizes are refused above")
def test_sizes_of_another_branch_are_refused(tmp_path):
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    captured = stages.capture(randomize(Upright()), (picture(),), dynamic_shapes=(sizes,))
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [picture()], progress=False))
    model = stages.compile(stages.requantize(reference))
    found = exported(model, tmp_path)
    for height, width in ((9, 9), (12, 7)):
        x = torch.randn(2, 3, height, width)
        assert_same(found(x), [model(x)])
    with pytest.raises(intaglio.errors.InputError):
        model(torch.randn(2, 3, 8, 9))
    assert found.resize([(2, 3, 8, 9)]) == c.SHAPE


class Counting(nets.ConvBnRelu):
    """Numbers its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


REFUSED = {
    "an island": (lambda: quantized(randomize(nets.ConvThenUnsupported()), X)[1], "float parts run in PyTorch"),
    "state": (lambda: quantized(randomize(Counting()), X)[1], r"changes its inputs or buffers \(calls\)"),
    "an input that is returned": (
        lambda: quantized(randomize(Body(lambda m, x: (m.c(x), x), c=nn.Conv2d(3, 3, 3))), X)[1],
        "does not compute",
    ),
}


@pytest.mark.parametrize(("lowered", "said"), REFUSED.values(), ids=REFUSED)
def test_export_c_names_the_parts_that_only_python_runs(lowered, said, tmp_path):
    with pytest.raises(UnsupportedError, match=said) as caught:
        stages.compile(lowered()).export_c(tmp_path / "out")
    assert caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_unknown_instruction_sets_and_unwritable_folders_are_errors(tmp_path):
    model = compiled(nets.ConvBnRelu)[0]
    with pytest.raises(BuildError, match="no kernels for sse; allowed are"):
        model.export_c(tmp_path, isa=("portable", "sse"))
    with pytest.raises(BuildError, match="no instruction set"):
        model.export_c(tmp_path, isa=())
    with pytest.raises(BuildError, match="both x86-64 and AArch64\n  remedy: export a folder for each kind"):
        model.export_c(tmp_path, isa=("avx2", "neon_dot", "portable"))
    for folder, isas in {"x86": ("avx2", "portable"), "arm": ("neon_dot", "portable")}.items():
        model.export_c(tmp_path / folder, isa=isas)
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot be written"):
        model.export_c(tmp_path / "file")


def test_several_handles_run_at_once(residual):
    """Each in a thread of Python, which waits for none while the library runs."""
    from concurrent.futures import ThreadPoolExecutor

    model, handles = compiled(nets.Residual)[0], [opened(residual) for _ in range(4)]
    expected = [model(picture(1 + i % 3, i)) for i in range(40)]

    def work(which: int) -> list[list[Tensor]]:
        return [handles[which](picture(1 + i % 3, i)) for i in range(40)]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            assert_same(results, expected)
    for handle in handles:
        handle.close()
