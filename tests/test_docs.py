"""What the documents show is run: the Python blocks of README.md and docs/library.md, the commands, the doctests."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shlex
import tomllib
from pathlib import Path

import pika
import pytest
from typer.testing import CliRunner

import warren
from tests.spark_session import spark as spark
from warren.cli.main import app
from warren.testing import running_broker

ROOT = Path(__file__).resolve().parent.parent


def blocks(document: str, language: str) -> list[tuple[int, str]]:
    """Line number and content of the fenced blocks of one language."""
    text = (ROOT / document).read_text()
    # Of all languages, or the end of one block would be taken for the beginning of another.
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(2)) + 1, match[2]) for match in found if match[1] == language]


def run_blocks(document: str) -> None:
    """With a broker at the address that the documents name."""
    namespace: dict[str, object] = {"__name__": "__main__", "pika": pika}
    with running_broker(http=True) as broker:
        for line, code in blocks(document, "python"):
            code = code.replace("amqp://guest:guest@127.0.0.1/", broker.url)
            code = code.replace("http://127.0.0.1:15672", broker.http_url)
            # Spark's idea of the current directory is that of its start.
            code = code.replace('"lake/orders"', repr(os.path.abspath("lake")))
            code = code.replace('"checkpoint"', repr(os.path.abspath("checkpoint")))
            # The lines before it stay empty, so that a traceback has the document's line numbers.
            exec(compile("\n" * (line - 1) + code, str(ROOT / document), "exec"), namespace)
        if "test_orders" in namespace:
            namespace["test_orders"](broker)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("pika_litter", "spark")
@pytest.mark.parametrize(("document", "at_least"), [("README.md", 4), ("docs/library.md", 10), ("docs/broker.md", 2)])
def test_the_python_blocks_of_a_document_run(document, at_least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(blocks(document, "python")) >= at_least
    run_blocks(document)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("pika_litter", "spark")
def test_the_commands_of_the_readme_run_after_its_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks("README.md")
    with warren.open("mystore") as store:
        store.queue("tasks").publish(b"for browse")
    lines = [line for _, block in blocks("README.md", "") for line in block.splitlines() if line.startswith("$ warren")]
    on_spark = [line for line in lines if line.startswith("$ warren spark ")]
    assert (len(lines), len(on_spark)) == (10, 5)
    for line in on_spark:  # test_pipeline_cli.py runs them
        assert CliRunner().invoke(app, ["spark", line.split()[3], "--help"]).exit_code == 0
    for line in lines:
        if line in on_spark:
            continue
        result = CliRunner().invoke(app, shlex.split(line.removeprefix("$ warren"), comments=True))
        assert result.exit_code == 0, (line, result.output)
    with warren.open("restored") as store:
        assert len(store.queue("tasks")) == 1


def test_the_targets_of_the_readme_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"run", "test", "test-full", "bench"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def modules_with_doctests() -> list[str]:
    source = ROOT / "src"
    files = sorted(path for path in (source / "warren").rglob("*.py") if ">>> " in path.read_text())
    return [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in files]


@pytest.mark.parametrize("module", modules_with_doctests())
def test_the_examples_in_docstrings_hold(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


DOCUMENTS = ["README.md", "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_links_of_a_document_lead_somewhere(document):
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_files_that_a_document_names_are_there(document):
    named = set(re.findall(r"`?\b((?:storage|queueing|kernel|cli)/\w+\.(?:pyx|py))\b", (ROOT / document).read_text()))
    assert [name for name in named if not (ROOT / "src" / "warren" / name).exists()] == []


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == warren.__version__
    assert project["readme"] == "README.md"
    assert f"## {warren.__version__}" in (ROOT / "CHANGELOG.md").read_text()
