"""The kernel once more, instrumented: every branch and comparison is told to `runtime.c`, every access is checked by the
address sanitizer. It needs nothing but the gcc that the kernel needs anyway.

A module is built when its source or a header is newer than what is there.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "src" / "warren" / "kernel"
HERE = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "fuzz"
RUNTIME = BUILT / "libwarren_fuzz.so"
# Those that read what others wrote, and what they keep it in.
MODULES = (
    *("client_scanner", "columns", "entry", "frames", "head_codec", "journal_codec", "overlay", "ranges"),
    *("segment_codec", "stage_codec", "store_table"),
)
FLAGS = ("-O1", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-fsanitize=address", "-fno-strict-aliasing", "-w")
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
}  # as in setup.py


def missing() -> str:
    """Why it cannot be built here; "" if it can."""
    found = _library("libasan.so")
    return "" if os.path.isabs(found) else "gcc has no address sanitizer here: apt-get install libgcc-12-dev"


def build() -> None:
    """One process at a time: tests run in two of them."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_what_is_old()


def _build_what_is_old() -> None:
    if _is_older(RUNTIME, HERE / "runtime.c"):
        _run("gcc", "-O2", "-shared", "-fPIC", HERE / "runtime.c", "-o", RUNTIME)
    headers = [*KERNEL.glob("*.pxd"), *KERNEL.glob("*.h")]
    old = [
        name for name in MODULES if _is_older(BUILT / f"{name}.so", KERNEL / f"{name}.pyx", *headers, HERE / "hooks.c")
    ]
    if not old:
        return
    made = cythonize(
        [Extension(f"warren.kernel.{name}", [str(KERNEL / f"{name}.pyx")]) for name in old],
        include_path=[str(ROOT / "src")],
        build_dir=str(BUILT / "c"),
        compiler_directives=DIRECTIVES,
        quiet=True,
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_compile, old, [extension.sources[0] for extension in made]))


def _compile(name: str, source: str) -> None:
    number, target = MODULES.index(name), BUILT / f"{name}.so"
    hooks = BUILT / f"{name}.hooks.o"
    _run("gcc", "-O2", "-fPIC", f"-DMODULE={number}", "-c", HERE / "hooks.c", "-o", hooks)
    _run(
        *("gcc", *FLAGS, "-fsanitize-coverage=trace-pc,trace-cmp", "-shared"),
        *("-I", sysconfig.get_path("include"), "-I", KERNEL, source, hooks, "-o", f"{target}.new"),
        *("-L", BUILT, "-lwarren_fuzz", f"-Wl,-rpath,{BUILT}"),
    )
    os.replace(f"{target}.new", target)


def branches(name: str) -> int:
    """How many places of a module tell of themselves."""
    shown = _run("objdump", "-d", "--no-show-raw-insn", BUILT / f"{name}.so")
    return sum("call" in line and "<__sanitizer_cov_trace_pc>" in line for line in shown.splitlines())


def environment() -> dict[str, str]:
    """For a process that imports the instrumented kernel."""
    return {
        **os.environ,
        "LD_PRELOAD": _library("libasan.so"),
        "PYTHONMALLOC": "malloc",  # else the sanitizer does not see where an object ends
        # A parser of inputs of some kilobytes has no reason to ask for 64 MiB.
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16:max_allocation_size_mb=64:allocator_may_return_null=0",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }


def _library(name: str) -> str:
    return _run("gcc", f"-print-file-name={name}").strip()


def _is_older(target: Path, *sources: Path) -> bool:
    if not target.exists():
        return True
    made = target.stat().st_mtime
    return any(source.stat().st_mtime > made for source in sources)


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout
