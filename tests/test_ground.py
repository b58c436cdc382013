"""The ground that everything stands on: the checksum, the shape of the tree, and the report of a full run."""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warren.kernel.checksum import crc32c, crc32c_software

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "warren"
KERNEL = SOURCE / "kernel"

MAX_LINES = 700

# Directories of .gitignore: nothing in them is part of the project.
IGNORED = {
    ".git",
    ".venv",
    "build",
    "dist",
    "data",
    "scratch",
    "__pycache__",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
}


def project_files() -> Iterator[Path]:
    for directory, names, files in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in IGNORED and not name.endswith(".egg-info"))
        yield from (Path(directory, name) for name in sorted(files) if not name.endswith(".so"))


def crc32c_by_the_definition(data: bytes) -> int:
    """One bit after the other, as the polynomial says. Slow, and right."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", [crc32c, crc32c_software])
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_of_a_known_vector_is_the_published_one(function, data, crc):
    assert function(data) == crc
    assert crc32c_by_the_definition(data) == crc


def test_the_instruction_and_the_table_agree_on_random_sizes_and_alignments(scale, seed, record_property):
    chance = random.Random(seed)
    buffer = memoryview(chance.randbytes(1 << 16))
    rounds = scale.scale(5000)
    for _ in range(rounds):
        size = chance.randrange(chance.choice((64, 1024, len(buffer))))
        start = chance.randrange(len(buffer) - size)
        data = buffer[start : start + size]
        assert crc32c(data) == crc32c_software(data), (start, size)
        if size < 64:
            assert crc32c(data) == crc32c_by_the_definition(data), (start, size)
    record_property("examples", rounds)


def test_a_checksum_in_parts_is_the_checksum_of_the_whole(scale, seed):
    chance = random.Random(seed)
    for _ in range(scale.scale(500)):
        data = chance.randbytes(chance.randrange(1, 5000))
        cut = chance.randrange(len(data))
        for function in (crc32c, crc32c_software):
            assert function(data[cut:], function(data[:cut])) == function(data)


def test_every_compiled_module_has_its_types_beside_it():
    modules = sorted(KERNEL.glob("*.pyx"))
    assert modules
    assert [path.name for path in modules if not path.with_suffix(".pyi").exists()] == []


def test_the_kernel_imports_nothing_above_it():
    imported = re.compile(r"^\s*(?:from|import|cimport)\s+(warren\b[\w.]*)", re.MULTILINE)
    allowed = ("warren.kernel", "warren.errors")
    wrong = [
        (path.name, module)
        for pattern in ("*.pyx", "*.pxd")
        for path in sorted(KERNEL.glob(pattern))
        for module in imported.findall(path.read_text())
        if not module.startswith(allowed)
    ]
    assert wrong == []


def test_no_module_imports_what_another_one_keeps_to_itself():
    """A name with an underscore may change with its module alone."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "warren":
                names = [alias.name for alias in node.names if re.match(r"_[^_]", alias.name)]
                found += [(str(path.relative_to(ROOT)), node.module, name) for name in names]
    assert found == []


def test_no_source_file_is_too_long_to_read_in_one_sitting():
    suffixes = (".py", ".pyx", ".pxd", ".pyi", ".h")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in SOURCE.rglob("*")
        if path.suffix in suffixes
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_file_names_a_path_of_somebodys_machine_or_a_registry():
    # Written in pieces, so that this file does not name them.
    path = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("home", "root", "work", "opt", "Users")) + r")/[\w.]")
    hosts = re.compile(
        "|".join((r"pypi\.(?:org|io)", r"python" + "hosted", r"deb\.debian", r"repo1?\.maven", r"ghcr\.io"))
    )
    found = []
    for file in project_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(text.splitlines(), 1):
            if path.search(line) or hosts.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.fixture
def little_project(tmp_path):
    """A project with our conftest and three tests: one passes and counts, one is skipped, one fails."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests" / "test_little.py").write_text(
        "import pytest\n"
        "def test_counts(scale, seed, record_property):\n"
        "    record_property('kills', scale.scale(300))\n"
        "@pytest.mark.skip(reason='no reason')\n"
        "def test_skipped(): pass\n"
        "def test_fails(): assert False\n"
    )
    return tmp_path


def run_tests(project: Path, scale: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--hypothesis-seed=77", *arguments]
    environment = {**os.environ, "WARREN_TEST_SCALE": scale}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)


def reports(project: Path) -> list[Path]:
    return list(project.glob("docs/reliability/*.md"))


def test_a_full_run_writes_what_it_counted(little_project):
    done = run_tests(little_project, "full")
    assert "1 failed, 1 passed, 1 skipped" in done.stdout.splitlines()[-1]
    [report] = reports(little_project)
    lines = report.read_text().splitlines()
    assert any(line.startswith("| tests/test_little.py | 3 | 1 | 1 | 1 |") for line in lines)
    assert "| tests/test_little.py::test_counts | kills | 300 |" in lines
    assert "| tests/test_little.py::test_counts | seed | 77 |" in lines


@pytest.mark.parametrize(("scale", "arguments"), [("small", []), ("full", ["-k", "counts"]), ("full", ["tests"])])
def test_a_small_or_partial_run_writes_no_report(little_project, scale, arguments):
    run_tests(little_project, scale, *arguments)
    assert reports(little_project) == []
