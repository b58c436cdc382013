"""One target in a process of its own, in the environment of `build.environment`: python -m tests.fuzz TARGET RUNS SEED BOX.

Prints one line of JSON: runs, corpus, branches that were reached. With `--input FILE` it runs that once: for what was found.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.fuzz.build import BUILT, MODULES, RUNTIME
from tests.fuzz.engine import BlackBox, Fuzzer, Runtime

_LEAK_ROUNDS = 20
_LEAK_BYTES = 65536  # an allocator's caches, lists that grew


class Instrumented:
    """Finds the instrumented modules of the kernel before the others are looked for."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module = name.rpartition(".")
        built = BUILT / f"{module}.so"
        if package != "warren.kernel" or not built.exists():
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, str(built))
        return importlib.machinery.ModuleSpec(name, loader, origin=str(built))


def main(arguments: list[str]) -> None:
    runtime = Runtime(RUNTIME)
    sys.meta_path.insert(0, Instrumented)
    from tests.fuzz.targets import TARGETS, noise

    target = TARGETS[arguments[0]]
    if arguments[1] == "--input":
        target.run(Path(arguments[2]).read_bytes())
        return
    runs, seed, box = int(arguments[1]), int(arguments[2]), BlackBox(Path(arguments[3]), create=False)
    fuzzer = Fuzzer(target.run, runtime, random.Random(seed), box)
    fuzzer.go([*target.seeds, *noise(seed)], runs)
    leaked = leaked_bytes(fuzzer)
    assert leaked < _LEAK_BYTES, f"{leaked} bytes more after {_LEAK_ROUNDS} rounds over the same inputs"
    reached = {name: runtime.reached(MODULES.index(name)) for name in target.modules}
    with open("/proc/self/status") as status:  # not ru_maxrss, which begins with that of the process before exec
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024
    print(json.dumps({"runs": fuzzer.runs, "corpus": len(fuzzer.corpus), "reached": reached, "peak MiB": peak}))


def leaked_bytes(fuzzer: Fuzzer) -> int:
    """What is allocated after the whole corpus ran again and again, beyond what the first round left."""
    allocated = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    allocated.restype = ctypes.c_size_t
    for _ in range(2):
        fuzzer.replay()
    before = int(allocated())
    for _ in range(_LEAK_ROUNDS):
        fuzzer.replay()
    return int(allocated()) - before


if __name__ == "__main__":
    main(sys.argv[1:])
