"""Compiles the kernel: every src/warren/kernel/<name>.pyx becomes the extension module warren.kernel.<name>.

The variable WARREN_KERNEL says which modules to build: `all` (the default), `none`, or names with commas between them; the
Makefile builds one after the other. With WARREN_LOGIC=compiled the modules of LOGIC, which are plain typed Python, are
compiled by mypyc as they are: those that a profile of single publishes and gets names. All else stands in pyproject.toml.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNEL = Path("src/warren/kernel")

LOGIC = [
    "storage/queue_state.py",
    "storage/pending_acks.py",
    "storage/paging.py",
    "storage/variable_queue.py",
    "storage/queue_index.py",
    "storage/seq_ids.py",
    "storage/rates.py",
    "storage/journal.py",
    "storage/committer.py",
    "queueing/limits.py",
    "queueing/queue.py",
]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
}


def kernel_extensions(wanted: str) -> list[Extension]:
    sources = {path.stem: path for path in sorted(KERNEL.glob("*.pyx"))}
    if wanted == "none":
        return []
    names = list(sources) if wanted == "all" else wanted.split(",")
    unknown = [name for name in names if name not in sources]
    if unknown:
        raise SystemExit(f"WARREN_KERNEL names {', '.join(unknown)}; the kernel has {', '.join(sources)}")
    headers = [str(path) for pattern in ("*.h", "*.pxd") for path in sorted(KERNEL.glob(pattern))]
    extensions = [
        Extension(
            f"warren.kernel.{name}",
            [str(sources[name])],
            include_dirs=[str(KERNEL)],
            depends=headers,
            extra_compile_args=["-O3"],
        )
        for name in names
    ]
    built: list[Extension] = cythonize(
        extensions, include_path=["src"], build_dir="build/cython", compiler_directives=DIRECTIVES
    )
    return built


def logic_extensions(wanted: str) -> list[Extension]:
    if wanted != "compiled":
        return []
    from mypyc.build import mypycify

    os.environ["MYPYPATH"] = "src"
    compiled: list[Extension] = mypycify([f"src/warren/{name}" for name in LOGIC], opt_level="3")
    return compiled


setup(
    ext_modules=kernel_extensions(os.environ.get("WARREN_KERNEL") or "all")
    + logic_extensions(os.environ.get("WARREN_LOGIC") or "pure")
)
