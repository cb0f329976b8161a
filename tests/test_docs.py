"""The pages of documentation: links, commands and Python examples name things that exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

import tierstore
from docs import tables
from tierstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("tierstore", "muon", "native", "bench", "examples", "tests")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".hpp")
)
# Modules that pages name ahead of their coming.
TO_COME: set[str] = set()
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def complaints_by_page(complain: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return what is wrong with each page that is not as it should be."""
    assert PAGES
    complaints = {str(page.relative_to(ROOT)): complain(page) for page in PAGES}
    return {name: found for name, found in complaints.items() if found}


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_complaints(page: Path, text: str) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    complaints = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            complaints.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(text if path == page else path.read_text()):
            complaints.append(f"{link}: no such heading")
    return complaints


def code_lines(text: str) -> list[str]:
    """Return the lines of code blocks, continued ones joined, and all code in sentences."""
    blocks = [block for _, language, block in FENCE.findall(text) if language != "python"]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", without_code(text))


def command_complaints(line: str) -> list[str]:
    """Return what does not exist of a command: subcommand, target, program, module, options."""
    options = re.findall(r"(?<=\s)--([a-z][a-z-]*)", line)
    if found := re.match(r"tierstore ([a-z]+)", line):
        command = typer.main.get_group(app).commands.get(found[1])
        if command is None:
            return [f"{line}: no such command"]
        known = {name for parameter in command.params for name in parameter.opts}
        return [f"{line}: no option --{name}" for name in options if f"--{name}" not in known]
    if found := re.match(r"make ([a-z-]+)", line):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [] if found[1] in targets else [f"{line}: no such target"]
    if found := re.match(r"(?:\S*/)?(?:python|torchrun)(?: .*)? (\w+/\w+\.py)(.*)", line):
        if not (ROOT / found[1]).is_file():
            return [f"{line}: no such program"]
        source = (ROOT / found[1]).read_text()
        options = re.findall(r"--([a-z][a-z-]*)", found[2])
        return [
            f"{line}: no option --{name}"
            for name in options
            if name.replace("-", "_") not in source and f"--{name}" not in source
        ]
    if found := re.match(r"(?:\S*/)?python -m ([\w.]+)", line):
        exists = importlib.util.find_spec(found[1]) is not None
        return [] if exists else [f"{line}: no such module"]
    return []


def path_complaints(code: str) -> list[str]:
    """Return the path of a module that is in neither the repository nor tierstore/."""
    if not re.fullmatch(r"(\w+/)+\w+\.py", code) or code in TO_COME:
        return []
    return [] if (ROOT / code).exists() or (ROOT / "tierstore" / code).exists() else [code]


def map_complaints(text: str) -> list[str]:
    """Return the modules that a table lists for a room of tierstore, and that are not there."""
    complaints = []
    for room, cells in re.findall(r"^\| `(\w+/)` \|(.*)\|$", text, re.MULTILINE):
        if (ROOT / "tierstore" / room).is_dir():
            for name in re.findall(r"`(\w+)`", cells):
                complaints += path_complaints(f"{room}{name}.py")
    return complaints


# Libraries that `make test-peers` has; examples with them are run there.
NOT_INSTALLED = ("accelerate", "lightning", "peft", "torchtitan", "transformers", "trl")


def python_complaints(source: str) -> list[str]:
    """Return what an example imports, or uses of tierstore and muon, that does not exist."""
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name not in NOT_INSTALLED:
                    raise
                continue
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("tierstore", "muon"):
            module, names = importlib.import_module(ast.unparse(node.value)), [node.attr]
        else:
            continue
        complaints += [f"{module.__name__}.{name}" for name in names if not hasattr(module, name)]
    return complaints


@pytest.mark.parametrize("text", ["[x](absent.md)", "[x](README.md#absent)", "[x](#absent)"])
def test_link_rule_sees(text: str) -> None:
    assert link_complaints(ROOT / "CONTRIBUTING.md", text)


def test_link_rule_allows() -> None:
    text = "# A `b-c`, d\n[x](docs/README.md) [y](#a-b-c-d) [z](https://example.org/absent)"
    assert link_complaints(ROOT / "CONTRIBUTING.md", text) == []


@pytest.mark.parametrize(
    "line",
    [
        "tierstore reticulate PATH",
        "tierstore verify PATH --absent",
        "make absent",
        "python bench/absent.py",
        "python bench/step.py --absent",
        ".venv/bin/python examples/absent.py",
        "torchrun --nproc-per-node 2 examples/train_ddp.py --absent",
        "python -m tests.absent",
    ],
)
def test_command_rule_sees(line: str) -> None:
    assert command_complaints(line)


@pytest.mark.parametrize(
    "line",
    [
        "tierstore verify PATH --json",
        "make test SCRATCH=/mnt/nvme",
        "python bench/step.py --small",
        "torchrun --nproc-per-node 2 examples/train_ddp.py --resume",
        "python -m tests.simulation.search replay 12/3/0",
        "python -c 'import io'",
    ],
)
def test_command_rule_allows(line: str) -> None:
    assert command_complaints(line) == []


def test_python_rule_sees() -> None:
    source = "from tierstore.tools.cli import absent\ntierstore.Absent()\nmuon.Muon"
    assert python_complaints(source) == ["tierstore.tools.cli.absent", "tierstore.Absent"]


@pytest.mark.parametrize("code", ["run/absent.py", "tests/tools/cli/absent.py"])
def test_path_rule_sees(code: str) -> None:
    assert path_complaints(code) == [code]


@pytest.mark.parametrize("code", ["run/committer.py", "tests/tools/cli/test_app.py", "rank-00000/"])
def test_path_rule_allows(code: str) -> None:
    assert path_complaints(code) == []


def test_map_rule_sees() -> None:
    assert map_complaints("| `run/` | `committer`, `absent` |") == ["run/absent.py"]


def test_links_lead_somewhere() -> None:
    assert complaints_by_page(lambda page: link_complaints(page, page.read_text())) == {}


def test_paths_exist() -> None:
    def complain(page: Path) -> list[str]:
        codes = re.findall(r"`([^`\n]+)`", without_code(page.read_text()))
        return [complaint for code in codes for complaint in path_complaints(code)]

    assert complaints_by_page(complain) == {}


def test_modules_of_the_map_exist() -> None:
    text = (ROOT / "docs/internals/architecture.md").read_text()
    assert map_complaints(text) == []


def test_commands_exist() -> None:
    def complain(page: Path) -> list[str]:
        lines = code_lines(page.read_text())
        if page.name == "format.md":  # Sealed files, which it shows, also begin with "tierstore".
            lines = [line for line in lines if not re.match(r"tierstore \w+ \d", line)]
        return [complaint for line in lines for complaint in command_complaints(line)]

    assert complaints_by_page(complain) == {}


def test_python_examples_use_names_that_exist() -> None:
    def complain(page: Path) -> list[str]:
        blocks = [block for _, kind, block in FENCE.findall(page.read_text()) if kind == "python"]
        return [found for block in blocks for found in python_complaints(textwrap.dedent(block))]

    assert complaints_by_page(complain) == {}


def test_paths_of_docs_in_the_code_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
        if not (ROOT / name).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_up_to_date(name: str) -> None:
    """Run `python docs/tables.py` if this fails."""
    page = (tables.REFERENCE / name).read_text()
    assert tables.with_table(page, tables.PAGES[name]()) == page


def test_every_argument_of_the_store_is_in_a_table() -> None:
    named = re.findall(r"^\| `(\w+)` \|", tables.options(), re.MULTILINE)
    assert sorted(named) == sorted(inspect.signature(tierstore.TierStore).parameters)


# Phrases that make a reader look back -> their number in sources and docs of zarr-python 3.4.2.
ZARR_LINES = 52_802
PHRASES = {
    r"\b(that|those) of\b": 4,
    r"\bof which\b": 7,
    r"\b(is|are) no\b": 25,
    r"[^\x22][,] too\b": 0,
}


def phrase_hits(phrase: str, text: str) -> list[int]:
    """Return the lines on which a phrase begins, also where a line ends within it."""
    pattern = phrase.replace(" ", r"""(?:[\s#/"]|f")+""")
    hits = re.finditer(pattern, text, re.IGNORECASE)
    return [text.count("\n", 0, hit.start()) + 1 for hit in hits]


def test_phrase_rule_sees() -> None:
    text = 'Those\nof\n# of\n# which is\n  f"no x,\nToo "x", "too"'
    assert [phrase_hits(phrase, text) for phrase in PHRASES] == [[1], [3], [4], [5]]


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_are_rare(phrase: str) -> None:
    """Repeat the noun; "whose" or two sentences; "not a"; "also"."""
    texts = {path.relative_to(ROOT): path.read_text() for path in [*PAGES, *SOURCES]}
    hits = [f"{name}:{line}" for name, text in texts.items() for line in phrase_hits(phrase, text)]
    most = PHRASES[phrase] * sum(map(len, map(str.splitlines, texts.values()))) // ZARR_LINES
    assert len(hits) <= most, f"{len(hits)} hits, at most {most}: {' '.join(hits)}"


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    options = ["-q", "-W", "--keep-going", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site/reference/api.html").read_text(encoding="utf-8")
    for name in ("tierstore.TierStore", "muon.Muon", "tierstore.integrations.lightning.Commit"):
        assert f'id="{name}"' in api
