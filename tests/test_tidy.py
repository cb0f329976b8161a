"""The rules of the design that a reader of one file cannot see: levels, effects, words.

Each rule is a function from source text to complaints, shown first on a text that breaks
it, then applied to every file of the repository.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The rooms of tierstore, lowest level first. An import goes to a lower level, or stays in its room.
LEVELS = (
    "errors units compiling",
    "threads user_warnings",
    "layout storage ranks",
    "run",
    "paging inspection",
    "checkpoint pages",
    "store",
    "averaged_model integrations optim",
    "tools",
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}

# Imports that break the rule, as (module, imported module).
EXCEPTIONS: set[tuple[str, str]] = set()

# Calls that do something: under `python -O` an assert around them would not.
EFFECTS = frozenset(
    {"acquire", "add", "append", "close", "commit", "create", "flush", "lock", "next", "pop"}
    | {"popleft", "put", "read", "readinto", "recv", "release", "remove", "rename", "restore"}
    | {"send", "step", "submit", "synchronize", "unlink", "wait", "write"}
)

# Marks of unfinished work, and words that the design has another one for. This file, which
# holds them all, is not searched.
FORBIDDEN = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bpinned[ -](host[ -])?(memory|buffer)")


def python_files(*folders: str) -> list[Path]:
    """Return all Python files under these folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def complaints_by_file(
    files: Iterable[Path], complain: Callable[[Path], list[str]]
) -> dict[str, list[str]]:
    """Return what is wrong with each file that is not as it should be."""
    complaints = {str(path.relative_to(ROOT)): complain(path) for path in files}
    assert complaints  # A folder that was renamed must not make a rule silent.
    return {name: found for name, found in complaints.items() if found}


def module_name(path: Path) -> str:
    """Return the dotted name of a file; a package has the name of its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source: str) -> Iterator[str]:
    """Yield each imported thing in full: ``from a.b import c`` gives ``a.b.c``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def prefixes(parts: list[str]) -> list[str]:
    """Return ``a``, ``a.b`` and so on: what is imported is a module, or a name in one."""
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def level_complaints(name: str, source: str, exceptions: set[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the imports of one module of tierstore."""
    room = name.split(".")[1] if "." in name else None
    if room is not None and room not in LEVEL_OF:
        return [f"{name} is in no level of tests/test_tidy.py"]
    complaints = []
    for target in imported_names(source):
        head, *rest = target.split(".")
        if head == "muon":
            complaints.append(f"{name} imports {target}: tierstore never imports muon")
        elif head == "":
            complaints.append(f"{name} imports {target}: write the full name")
        elif head == "tierstore" and room is not None:
            if not rest or rest[0] not in LEVEL_OF:
                complaints.append(f"{name} imports {target}, which is in no level")
            elif rest[0] == room and (ROOT / "tierstore" / room).is_dir():
                continue  # A module of its own room; cycles are refused everywhere.
            elif any((name, f"tierstore.{module}") in exceptions for module in prefixes(rest)):
                continue
            elif LEVEL_OF[rest[0]] >= LEVEL_OF[room]:
                complaints.append(f"{name} imports {target}, which is not below it")
    return complaints


def user_complaints(source: str, public: set[str]) -> list[str]:
    """Return the uses of tierstore that are not public names, or its integrations.

    A use is of the longest name that is written: ``tierstore.pages.Chunk``, not its ``numel``.
    """
    used = {name for name in imported_names(source) if name.startswith("tierstore.")}
    for node in ast.walk(ast.parse(source)):
        written = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if found := re.match(r"tierstore\.(pages\.)?\w+", written):
            used.add(found[0])
    names = sorted(name.removeprefix("tierstore.") for name in used)
    return [
        f"tierstore.{name} is not public"
        for name in names
        if name not in public and not name.startswith("integrations.")
    ]


def assert_complaints(source: str) -> list[str]:
    """Return the asserts whose condition calls something that has an effect."""
    complaints = []
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                if called in EFFECTS:
                    complaints.append(f"line {statement.lineno}: assert around {called}()")
    return complaints


def listed_names(module: str) -> set[str]:
    """Return what a module lists in ``__all__``."""
    for node in ast.parse((ROOT / module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def public_names() -> set[str]:
    """Return the names for users, such as ``TierStore``, and for optimizers: ``pages.Chunk``."""
    of_pages = {f"pages.{name}" for name in listed_names("tierstore/pages.py")}
    return listed_names("tierstore/__init__.py") | of_pages


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("tierstore.layout.chunks", "import tierstore.store", "not below"),
        ("tierstore.layout.chunks", "def f():\n    from tierstore import store", "not below"),
        ("tierstore.units", "from tierstore.errors import StorageError", "not below"),
        ("tierstore.storage.base", "from tierstore.layout.chunks import Chunk", "not below"),
        ("tierstore.run.committer", "from tierstore.paging.pager import Pager", "not below"),
        ("tierstore.store", "from muon import Muon", "never imports muon"),
        ("tierstore.store", "from .units import KIB", "full name"),
        ("tierstore.store", "from tierstore import TierStore", "in no level"),
        ("tierstore.novelty", "", "in no level"),
    ],
)
def test_import_rule_sees(name: str, source: str, complaint: str) -> None:
    (found,) = level_complaints(name, source, set())
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tierstore", "from tierstore.store import TierStore"),
        ("tierstore.storage.uring", "from tierstore.storage.base import Storage"),
        ("tierstore.storage", "from tierstore.units import Extent"),
        ("tierstore.paging.pager", "import torch\nfrom tierstore.run.committer import Committer"),
    ],
)
def test_import_rule_allows(name: str, source: str) -> None:
    assert level_complaints(name, source, set()) == []


def test_import_rule_allows_a_named_exception() -> None:
    name, source = "tierstore.run.history", "from tierstore.paging.page import Page"
    exceptions = {("tierstore.run.history", "tierstore.paging.page")}
    assert level_complaints(name, source, set())
    assert level_complaints(name, source, exceptions) == []


@pytest.mark.parametrize(
    "source",
    [
        "import tierstore.layout.page_layout",
        "from tierstore.layout.page_layout import Page",
        "from tierstore import page",
        "import tierstore\ntierstore.page.layout()",
        "from tierstore import _native",
        "import tierstore\ntierstore.Chunk(1)",
        "import tierstore\ntierstore.pages.Session.begin_commit()",
    ],
)
def test_public_rule_sees(source: str) -> None:
    assert user_complaints(source, {"TierStore"})


def test_public_rule_allows_public_names() -> None:
    source = (
        "import tierstore\nfrom tierstore import TierStore\n"
        "tierstore.TierStore('d').pages.sweep()\ntierstore.pages.Chunk.numel"
    )
    assert user_complaints(source, {"TierStore", "pages", "pages.Chunk"}) == []


@pytest.mark.parametrize(
    "source", ["assert h.wait() == 4", "assert x and q.pop()", "assert next(i), 'text'"]
)
def test_assert_rule_sees(source: str) -> None:
    assert assert_complaints(source)


def test_assert_rule_allows_questions() -> None:
    assert assert_complaints("assert len(x) == 4, h.wait()\nassert x.done()") == []


def test_imports_go_to_a_lower_level() -> None:
    def complain(path: Path) -> list[str]:
        return level_complaints(module_name(path), path.read_text(), EXCEPTIONS)

    assert complaints_by_file(python_files("tierstore"), complain) == {}


def test_every_exception_is_needed() -> None:
    needless = set()
    for name, imported in EXCEPTIONS:
        source = (ROOT / (name.replace(".", "/") + ".py")).read_text()
        complaints = level_complaints(name, source, EXCEPTIONS - {(name, imported)})
        if not any(imported in complaint for complaint in complaints):
            needless.add((name, imported))
    assert needless == set()


@pytest.mark.parametrize("package", ["tierstore", "muon"])
def test_no_import_cycles(package: str) -> None:
    sources = {module_name(path): path.read_text() for path in python_files(package)}
    assert sources
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        # What is imported is a module, or a name in one.
        graph[name] = {
            target if target in sources else target.rpartition(".")[0]
            for target in imported_names(source)
        } & sources.keys()
    graphlib.TopologicalSorter(graph).prepare()


def test_only_public_names_of_tierstore_are_used() -> None:
    public = public_names()

    def complain(path: Path) -> list[str]:
        return user_complaints(path.read_text(), public)

    assert complaints_by_file(python_files("muon", "examples"), complain) == {}


def test_no_assert_around_effects() -> None:
    files = python_files("tierstore", "muon", "examples", "bench")
    assert complaints_by_file(files, lambda path: assert_complaints(path.read_text())) == {}


def decision_complaints(source: str, decisions: str) -> list[str]:
    """Return the decisions that comments point to and that no heading has."""
    headings = set(re.findall(r"^### (.+)$", decisions, re.M))
    named = re.findall(r"# decisions: ([^.\n]+)", source)
    return [f"no decision is called {name!r}" for name in named if name not in headings]


def test_decision_rule_sees() -> None:
    decisions = "### One path\n\nText"
    assert decision_complaints("x = 1  # decisions: Two paths", decisions)
    assert decision_complaints("# decisions: One path. And why\nx = 1", decisions) == []


def test_comments_point_to_decisions() -> None:
    decisions = (ROOT / "docs/internals/decisions.md").read_text()

    def complain(path: Path) -> list[str]:
        return decision_complaints(path.read_text(), decisions)

    assert complaints_by_file(python_files("tierstore", "muon"), complain) == {}


def test_public_module_says_its_idea() -> None:
    def complain(path: Path) -> list[str]:
        is_said = path.name.startswith("_") or ast.get_docstring(ast.parse(path.read_text()))
        return [] if is_said else ["begin it with a docstring"]

    files = python_files("tierstore", "muon", "examples", "bench")
    assert complaints_by_file(files, complain) == {}


def test_no_forbidden_words() -> None:
    folders = ("tierstore", "muon", "native", "examples", "bench", "tests", "docs")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    texts += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    suffixes = {"", ".py", ".pyi", ".md", ".cpp", ".hpp", ".sh"}
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.is_file() and path.suffix in suffixes and path != Path(__file__).resolve()
        if {"golden", "fixtures"}.isdisjoint(path.parts)
        for match in FORBIDDEN.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("text", ["# TODO later", "in pinned memory"])
def test_word_rule_sees(text: str) -> None:
    assert FORBIDDEN.search(text)


def test_every_public_name_can_be_imported() -> None:
    tierstore = importlib.import_module("tierstore")
    for name in sorted(public_names() - {"pages"}):
        assert attrgetter(name)(tierstore).__module__.startswith("tierstore."), name
