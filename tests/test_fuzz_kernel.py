"""A coverage-guided fuzzer over every parser of the kernel: no crash, no access outside of an object, no hang, no growth."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import build
from tests.fuzz.engine import MOST_BYTES, BlackBox

pytestmark = [
    pytest.mark.skipif(build.missing() != "", reason=build.missing()),
    pytest.mark.xdist_group("fuzz"),  # the kernel is instrumented once
    pytest.mark.timeout(1800),
]
TARGETS = ("frames", "client_scanner", "head_codec", "journal", "segment", "stage", "store")
_HANG_SECONDS = 60.0  # without a single run: one takes less than a millisecond


@pytest.fixture(scope="module")
def instrumented() -> None:
    build.build()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_that_a_parser_is_given_harms_it(target, instrumented, tmp_path, scale, seed, record_property):
    box = BlackBox(tmp_path / "box", create=True)
    with (tmp_path / "said").open("w+") as said:
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", target, str(scale.scale(100_000)), str(seed)]
        process = subprocess.Popen(
            [*command, str(tmp_path / "box")], env=build.environment(), stdout=said, stderr=said, cwd=build.ROOT
        )
        hung = not ends(process, box)
        said.seek(0)
        text = said.read()
    runs, data = box.read()
    box.close()
    if hung or process.returncode:
        pytest.fail(
            f"run {runs} of {target} {'hangs' if hung else f'ended with {process.returncode}'}; seed {seed}, "
            f"input {data.hex()}\n{text[-6000:]}"
        )
    found = json.loads(text.splitlines()[-1])
    record_property("runs", found["runs"])
    record_property("inputs kept", found["corpus"])
    for module, reached in found["reached"].items():
        record_property(f"branches of {module}", f"{reached} of {build.branches(module)}")
        assert reached > 0, f"{module} is not instrumented"
    assert found["peak MiB"] < 500


def ends(process: subprocess.Popen[bytes], box: BlackBox) -> bool:
    """Wait for it; False: it stood still, and was killed."""
    before, since = -1, time.monotonic()
    while True:
        try:
            process.wait(0.5)
            return True
        except subprocess.TimeoutExpired:
            runs, data = box.read()
            if (runs, data) != before:
                before, since = (runs, data), time.monotonic()
            elif time.monotonic() - since > _HANG_SECONDS:
                process.kill()
                process.wait()
                return False


def test_the_fuzzer_gets_past_checksums(instrumented, tmp_path):
    """From one record to others that are sound and say something else, which chance would not do."""
    script = tmp_path / "find.py"
    script.write_text(
        "import random, sys\n"
        "from tests.fuzz.__main__ import Instrumented, BlackBox, Fuzzer, Runtime, RUNTIME, Path\n"
        "runtime = Runtime(RUNTIME)\n"
        "sys.meta_path.insert(0, Instrumented)\n"
        "from warren.kernel.stage_codec import decode_stage\n"
        "from tests.fuzz.targets import _staged\n"
        "def run(data):\n"
        "    heads = []\n"
        "    decode_stage(data, 10, heads, [], [], [])\n"
        "    if heads and heads[0] not in (b'', b'head'):\n"
        "        print('found', heads[0])\n"
        "        sys.exit(0)\n"
        "box = BlackBox(Path(sys.argv[1]), create=True)\n"
        "Fuzzer(run, runtime, random.Random(1), box).go([_staged([b'head'], [0], [b'body'])], 5_000)\n"
    )
    command = [sys.executable, "-W", "ignore", script, tmp_path / "box"]
    done = subprocess.run(command, env=build.environment(), cwd=build.ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("found"), done.stderr[-2000:]


def test_an_input_fits_into_the_black_box(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "box", create=True)
    box.write(7, b"x" * MOST_BYTES)
    assert box.read() == (7, b"x" * MOST_BYTES)
    box.close()
