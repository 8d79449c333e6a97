"""The kernel cache and the thread pool: what is promised when things go wrong, and when many do it at once."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from intaglio import config
from intaglio.errors import BuildError, InputError
from intaglio.native import compile as compiler
from intaglio.native import compiler_runs
from intaglio.native import cpu as machine
from intaglio.native import native_library as library
from intaglio.native.compile import build, build_units, is_intact, load
from intaglio.native.toolchain import find_toolchain
from intaglio.native.units import library_units

EXPORT = 'extern "C" __attribute__((visibility("default"))) '


def answer(number: int) -> str:
    return f"{EXPORT}int answer() {{ return {number}; }}\n"


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# ---- machine


def test_instruction_sets_are_listed_best_first_and_end_in_portable():
    flags = "avx2 f16c avx512f avx512bw avx512dq avx512vl avx512_vnni sse2"
    assert machine.supported(machine.read_flags(f"model\nflags : {flags}\n")) == ("avx512vnni", "avx2", "portable")
    assert machine.supported(machine.read_flags(f"flags : {flags} amx_tile amx_int8"))[:2] == ("amx_int8", "avx512vnni")
    assert machine.supported(machine.read_flags("flags : avx2 f16c avx512f")) == ("avx2", "portable")
    assert machine.supported(machine.read_flags("flags : avx2 f16c avx_vnni")) == ("avxvnni", "avx2", "portable")
    assert machine.supported(machine.read_flags("flags : avx2")) == ("portable",)
    assert machine.supported(machine.read_flags("")) == ("portable",)
    assert machine.isas()[-1] == "portable"
    assert set(machine.ISA_FLAGS) == set(machine.CPU_FLAGS)


def test_cache_sizes_grow_with_the_level(monkeypatch, tmp_path):
    assert 0 < machine.caches().l1 < machine.caches().l2
    monkeypatch.setattr(machine, "CACHE_FOLDER", tmp_path / "missing")
    assert machine.caches.__wrapped__() == machine.TYPICAL_CACHES


# ---- build cache


def test_a_built_library_runs_and_its_source_is_next_to_it(fresh_cache):
    path = build(answer(41), name="model.layer1[0]", isa="portable")
    assert load(path).answer() == 41
    assert path.parent == fresh_cache / "kernels"
    assert path.with_suffix(".cpp").read_text() == answer(41)
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".cpp", ".so"]


def test_the_same_text_is_compiled_once(fresh_cache, counting_compiler):
    paths = {build(answer(1), name="once", isa="portable") for _ in range(3)}
    assert len(paths) == 1
    assert len(counting_compiler.read_text().split()) == 1
    build(answer(1), name="once", isa="portable", force=True)
    assert len(counting_compiler.read_text().split()) == 2


def test_text_instruction_set_and_compiler_are_in_the_key(fresh_cache, counting_compiler, monkeypatch):
    paths = {build(answer(1), name="k", isa="portable"), build(answer(2), name="k", isa="portable")}
    paths.add(build(answer(1), name="k", isa="avx2"))
    monkeypatch.delenv("CXX")
    paths.add(build(answer(1), name="k", isa="portable"))
    assert len(paths) == 4


def test_an_included_header_is_in_the_key(fresh_cache, tmp_path, monkeypatch):
    monkeypatch.setattr("intaglio.native.units.HEADER_FOLDER", tmp_path)
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    paths = set()
    for value in (1, 2):
        (tmp_path / "inner.h").write_text(f"constexpr int kValue = {value};\n")
        path = build(f'#include "outer.h"\n{EXPORT}int value() {{ return kValue; }}', name="header", isa="portable")
        assert load(path).value() == value
        paths.add(path)
    assert len(paths) == 2


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:999] + b"?" + b[1000:]])
def test_a_damaged_entry_is_built_again(fresh_cache, damage):
    path = build(answer(7), name="damaged", isa="portable")
    path.write_bytes(damage(path.read_bytes()))
    assert not is_intact(path)
    assert load(build(answer(7), name="damaged", isa="portable")).answer() == 7
    assert is_intact(path)


def test_an_interrupt_stops_the_compiler_without_partial_files(fresh_cache, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    body = f'[ "$1" = --version ] && exit\nsleep 600 & echo $! > {pid}\nkill -INT $PPID\nwait'
    with monkeypatch.context() as patch, heard(signal.SIGINT):
        patch.setenv("CXX", str(script(tmp_path / "endless", body)))
        with pytest.raises(KeyboardInterrupt):
            build(answer(3), name="interrupted", isa="portable")
    assert [file.suffix for file in (fresh_cache / "kernels").iterdir()] == [".cpp"]
    wait_for_end(int(pid.read_text()))
    assert load(build(answer(3), name="interrupted", isa="portable")).answer() == 3


@contextlib.contextmanager
def heard(number: signal.Signals) -> Iterator[None]:
    """A signal that shells have what they run in the background ignore."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def wait_for_end(pid: int) -> None:
    """Fails unless the process ends; one that nobody has collected yet (state Z) has ended."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} of the compiler is still running")


def test_the_library_that_is_built_in_the_background_is_compiled_once(fresh_cache, counting_compiler, monkeypatch):
    monkeypatch.setattr(library, "runtime", cache(library.runtime.__wrapped__))
    monkeypatch.setattr(library, "_trusted", [])
    library.build_ahead()
    assert library.builds_in_background()
    assert library.runtime().intaglio_parallel
    library.build_ahead()
    assert len(counting_compiler.read_text().split()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_compilers_in_the_background_have_a_lower_priority(fresh_cache, tmp_path, monkeypatch):
    seen = tmp_path / "niceness"
    monkeypatch.setenv("CXX", str(script(tmp_path / "shows_niceness", f'nice >> {seen}\nexec g++ "$@"')))
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def build_in_background() -> None:
        compiler_runs.yield_cores()
        build(answer(9), name="background", isa="portable")

    thread = threading.Thread(target=build_in_background)
    thread.start()
    thread.join()
    assert int(seen.read_text().split()[-1]) == max(own, compiler_runs.BACKGROUND_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_threads_that_build_the_same_text_compile_it_once(fresh_cache, counting_compiler):
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: build(answer(5), name="threads", isa="portable"), range(8)))
    assert len(paths) == 1
    assert len(counting_compiler.read_text().split()) == 1


def test_processes_that_build_the_same_text_all_succeed(fresh_cache):
    call = f"build({answer(6)!r}, name='p', isa='portable')"
    code = f"from intaglio.native.compile import build, load\nassert load({call}).answer() == 6"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list((fresh_cache / "kernels").iterdir())) == 2


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for file in (path, path.with_suffix(".cpp")):
        os.utime(file, (then, then))


def test_the_least_recently_used_entries_are_evicted_when_the_cache_is_full(fresh_cache, monkeypatch):
    paths = [build(answer(n), name=f"n{n}", isa="portable") for n in range(3)]
    for path, seconds in zip(paths, (3000, 2000, 1000), strict=True):
        age(path, seconds)
    build(answer(0), name="n0", isa="portable")  # a hit: now the most recently used
    room = sum(path.stat().st_size for path in paths) + (1 << 10)
    monkeypatch.setattr(config, "cache_limit_bytes", lambda: room)
    added = build(answer(3), name="n3", isa="portable")
    assert [path.exists() for path in (*paths, added)] == [True, False, True, True]
    assert not paths[1].with_suffix(".cpp").exists()


def test_the_entry_just_built_survives_a_limit_of_zero(fresh_cache, monkeypatch):
    monkeypatch.setenv("INTAGLIO_CACHE_MB", "0")
    old = build(answer(1), name="old", isa="portable")
    age(old, 1000)
    assert load(build(answer(2), name="new", isa="portable")).answer() == 2
    assert not old.exists()


@pytest.mark.parametrize("value", ["1 GB", "-1", "1.5"])
@pytest.mark.parametrize(
    ("variable", "read"), [("INTAGLIO_CACHE_MB", config.cache_limit_bytes), ("INTAGLIO_PLANS", config.max_plans)]
)
def test_a_setting_that_is_not_a_number_is_named(variable, read, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=f"(?s){variable}.*{value}.*unset it"):
        read()
    monkeypatch.setenv(variable, "")
    assert read() > 0


def test_files_of_a_killed_process_are_removed_by_a_later_build(fresh_cache):
    left = fresh_cache / "kernels" / ".build-left"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    build(answer(1), name="later", isa="portable")
    assert not left.exists()


@pytest.mark.parametrize("chosen", ["no-such-compiler", ""])
def test_without_a_compiler_the_error_says_what_to_install(fresh_cache, monkeypatch, chosen):
    monkeypatch.setenv("CXX", chosen)
    if not chosen:
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="install g\\+\\+ or clang") as caught:
        build(answer(1), name="conv1", isa="portable")
    assert caught.value.where == "conv1"
    assert "CXX" in str(caught.value)


def test_a_compile_error_has_the_path_and_the_compilers_message(fresh_cache):
    with pytest.raises(BuildError, match="expected") as caught:
        build("int broken( {", name="broken", isa="portable")
    (source,) = (fresh_cache / "kernels").iterdir()
    assert str(source) in str(caught.value)
    assert source.suffix == ".cpp"


@pytest.mark.parametrize(
    "body",
    [
        "#include <string>\nint f(int n) { return std::to_string(n).size(); }",
        "#include <math.h>\nfloat f(float x) { return expf(x); }",
    ],
    ids=["libstdc++", "libm"],
)
def test_programs_that_call_libstdcxx_or_libm_do_not_link(fresh_cache, body):
    include, function = body.split("\n")
    with pytest.raises(BuildError, match=r"undefined (reference|symbol)|file not found"):
        build(f"{include}\n{EXPORT}{function}", name="calls", isa="portable")


def test_an_error_of_a_compiler_that_links_says_that_linking_failed(fresh_cache):
    with pytest.raises(BuildError, match=r"fails to link .*undefined-.*\.cpp, which it has compiled \(status"):
        build(f"int missing();\n{EXPORT}int f() {{ return missing(); }}", name="undefined", isa="portable")


@pytest.mark.parametrize(
    ("change", "said"), [(Path.unlink, "No such file"), (lambda path: path.chmod(0o644), "Permission denied")]
)
def test_a_compiler_that_was_removed_is_no_error_of_the_cache(change, said, fresh_cache, tmp_path, monkeypatch):
    compiler_path = script(tmp_path / "removed", 'exec g++ "$@"')
    monkeypatch.setenv("CXX", str(compiler_path))
    toolchain = find_toolchain("first")
    build(answer(1), name="first", isa="portable")
    change(compiler_path)
    monkeypatch.setattr(compiler, "find_toolchain", lambda name: toolchain)  # found just before it was removed
    with pytest.raises(BuildError, match=f"second: {compiler_path} cannot be started: .*{said}") as caught:
        build(answer(2), name="second", isa="portable")
    assert caught.value.remedy.startswith("install g++ or clang")


def test_a_compiler_that_fails_leaves_no_pipes_of_others_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BuildError) as caught:
        compiler_runs.run_together([["false"], ["sleep", "600"]], "pipes", tmp_path)
    assert caught.value.where == "pipes"  # the exception keeps what it was raised from
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cache_folder_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="INTAGLIO_CACHE_DIR"):
        build(answer(1), name="k", isa="portable")


def test_a_library_that_does_not_load_is_a_build_error(tmp_path):
    (tmp_path / "not.so").write_text("text")
    with pytest.raises(BuildError, match="cannot be loaded"):
        load(tmp_path / "not.so")


# ---- thread pool

BODIES = """
#include "base/pool.h"
#include <sched.h>
#define BODY extern "C" __attribute__((visibility("default"))) void
struct Nested { IntaglioParallel parallel; int calls, threads; };
struct Rounds { int rounds, broken; };
struct Meeting { int there, awaited; };
static IntaglioBarrier barrier;
static int32_t arrivals;

BODY mark(void* context, int thread, int threads) {
    __atomic_fetch_add(&((int*)context)[thread], threads, __ATOMIC_RELAXED);
}
static void inner(void* context, int thread, int threads) {
    Nested* nested = (Nested*)context;
    __atomic_fetch_add(&nested->calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&nested->threads, threads, __ATOMIC_RELAXED);
}
BODY nest(void* context, int, int) { ((Nested*)context)->parallel(inner, context, 4); }
BODY meet(void* context, int thread, int threads) {
    Rounds* job = (Rounds*)context;
    for (int round = 1; round <= job->rounds; ++round) {
        __atomic_fetch_add(&arrivals, 1, __ATOMIC_RELAXED);
        intaglio_barrier_wait(&barrier, threads);
        if (__atomic_load_n(&arrivals, __ATOMIC_RELAXED) != round * threads) job->broken = 1;
        intaglio_barrier_wait(&barrier, threads);
    }
    intaglio_barrier_wait(&barrier, threads);
    if (thread == 0) arrivals = 0;
}
BODY attend(void* context, int thread, int threads) {
    Meeting* meeting = (Meeting*)context;
    if (thread == 0) __atomic_fetch_add(&meeting->there, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&meeting->there, __ATOMIC_SEQ_CST) < meeting->awaited) sched_yield();
}
"""


class Nested(ctypes.Structure):
    _fields_ = (("parallel", ctypes.c_void_p), ("calls", ctypes.c_int), ("threads", ctypes.c_int))


class Rounds(ctypes.Structure):
    _fields_ = (("rounds", ctypes.c_int), ("broken", ctypes.c_int))


class Meeting(ctypes.Structure):
    _fields_ = (("there", ctypes.c_int), ("awaited", ctypes.c_int))


@pytest.fixture(scope="module")
def bodies():
    return load(build(BODIES, name="pool_bodies", isa="portable"))


def parallel(body, context, threads: int) -> None:
    library.runtime().intaglio_parallel(ctypes.cast(body, library.BODY), ctypes.byref(context), threads)


def marks(bodies, threads: int) -> list[int]:
    context = (ctypes.c_int * threads)()
    parallel(bodies.mark, context, threads)
    return list(context)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_every_thread_of_a_job_runs_once_also_when_there_are_more_than_cores(bodies, threads):
    for _ in range(50):
        assert marks(bodies, threads) == [threads] * threads


def test_a_sleeping_pool_wakes(bodies):
    for _ in range(5):
        time.sleep(0.005)  # far beyond the spin
        assert marks(bodies, 3) == [3, 3, 3]


def test_a_nested_call_runs_serially(bodies):
    context = Nested(library.parallel_address())
    parallel(bodies.nest, context, 3)
    assert (context.calls, context.threads) == (3, 3)


def test_python_threads_share_the_pool(bodies):
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: [marks(bodies, n % 4 + 1) for _ in range(100)], range(12)))
    assert all(found == [[n % 4 + 1] * (n % 4 + 1)] * 100 for n, found in enumerate(results))


@pytest.mark.case("backend 33")
def test_jobs_of_several_callers_run_at_once(bodies):
    meeting = Meeting(awaited=4)  # none of them ends before all have begun
    callers = [threading.Thread(target=parallel, args=(bodies.attend, meeting, 3)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert meeting.there == 4
    assert marks(bodies, 3) == [3, 3, 3]


def test_programs_that_run_at_once_divide_the_cores(bodies):
    def shared(body, context, threads: int) -> None:
        library.runtime().intaglio_parallel_shared(ctypes.cast(body, library.BODY), ctypes.byref(context), threads)

    asked, meeting = 8, Meeting(awaited=2)
    counts = [(ctypes.c_int * asked)() for _ in range(3)]
    shared(bodies.mark, counts[0], asked)
    other = threading.Thread(target=shared, args=(bodies.attend, meeting, 2))
    other.start()
    while not meeting.there:
        time.sleep(0.001)
    shared(bodies.mark, counts[1], asked)
    meeting.there = 2
    other.join()
    shared(bodies.mark, counts[2], asked)
    part = min(asked, max(1, len(os.sched_getaffinity(0)) // 2))
    assert list(counts[0]) == list(counts[2]) == [asked] * asked
    assert list(counts[1]) == [part] * part + [0] * (asked - part)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_no_thread_passes_a_barrier_before_all_arrive(bodies, threads):
    job = Rounds(rounds=200)
    parallel(bodies.meet, job, threads)
    assert job.broken == 0


@pytest.mark.slow(reason="forks while threads run; test_quantized_model.py has a forked child, too")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own_even_if_a_job_was_running(bodies):
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [marks(bodies, 3) for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        for _ in range(10):
            assert child_status(lambda: marks(bodies, 3) == [3, 3, 3]) == 0
    finally:
        stop.set()
        busy.join()
    assert marks(bodies, 3) == [3, 3, 3]


def child_status(check) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow(reason="compiles units of the library; the library in the background is compiled once above")
def test_units_that_were_built_ahead_are_not_compiled_again(fresh_cache, monkeypatch):
    units = library_units('#include "layers/matmul.h"\n')
    place = {"isa": machine.isas()[0], "toolchain": find_toolchain("units"), "folder": fresh_cache / "kernels"}
    build_units(units, **place)
    built = sorted((fresh_cache / "kernels").glob("library_*.o"))
    assert [path.name.rsplit("-", 1)[0] for path in built] == [unit.name for unit in units]
    monkeypatch.setattr(compiler, "_unit_commands", lambda missing, command, scratch: pytest.fail("compiled again"))
    build_units(units, **place)
