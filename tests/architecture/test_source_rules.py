"""Rules about the source itself that no linter in use knows."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "infinity").rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".c", ".cpp", ".h", ".hpp", ".inl"})
SOURCES = [*MODULES, *NATIVE, *sorted((ROOT / "bench").rglob("*.py"))]
JUNK_DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}
MAX_LINES = 450
NOTE = re.compile(r"\[Note: ([^\]]+)\]")


def relative(path: Path) -> str:
    """Return a path as the failure should show it."""
    return path.relative_to(ROOT).as_posix()


def without_comments(text: str) -> str:
    """Return C or C++ source without comments and string literals."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_have_one_subject(path: Path) -> None:
    """No junk-drawer names, and no file longer than a reader can hold."""
    assert path.stem not in JUNK_DRAWERS or relative(path) == "infinity/utils.py"  # the name that scripts import from
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_shipped_modules_neither_assert_nor_print(path: Path) -> None:
    """Shipped code raises typed errors and leaves the terminal to cli, whatever a noqa says."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_stage_table_asks_which_stage(path: Path) -> None:
    """What a ZeRO stage partitions is a table in placement/stages.py; no other code branches on a stage."""
    if relative(path) == "infinity/placement/stages.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in (node.left, *node.comparators)}
            assert "stage" not in names, f"line {node.lineno}"


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_code_returns_errors_and_says_nothing(path: Path) -> None:
    """No printing, aborting or asserting in native code, and no torch header."""
    code = without_comments(path.read_text())
    assert re.search(r"\b(?:f?printf|puts|perror|abort|assert|_?exit|std::(?:cout|cerr|terminate))\b\s*[(<;]", code) is None
    assert re.search(r"#\s*include\s*<(?:torch|ATen|c10)", path.read_text()) is None


def test_named_notes_are_defined_once_and_cited() -> None:
    """A note is defined once, by a line that begins with its name; every note is cited and every citation has its note."""
    defined: Counter[str] = Counter()
    cited: set[str] = set()
    for path in SOURCES:
        for line in path.read_text().splitlines():
            for name in NOTE.findall(line):
                if line.strip().lstrip("#/* ").startswith(f"[Note: {name}]"):
                    defined[name] += 1
                else:
                    cited.add(name)
    assert set(defined.values()) <= {1}
    assert set(defined) == cited
