"""Write the map of files in ARCHITECTURE.md from each file's own first line; --check only compares."""

import ast
import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- map: written by `make map` -->\n", "<!-- end of map -->"
MAPPED = ("infinity", "csrc", "bench", "scripts")
RESULTS = "bench/results/"  # measured, not written: one line for the folder
WITHOUT_COMMENTS = {"py.typed": "Says that the package is typed."}


def first_words(path: Path) -> str:
    """Return what a file says about itself: the first line of its docstring or of its first comment."""
    if path.name in WITHOUT_COMMENTS:
        return WITHOUT_COMMENTS[path.name]
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    lines = (line.strip() for line in text.splitlines() if not line.startswith("#!"))
    return next((line.strip("#/*- ").strip() for line in lines if line.strip("#/*- ")), "")


def tracked_files() -> list[Path]:
    """Return the mapped files that git tracks and that exist, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "--", *MAPPED], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in map(Path, listed.splitlines()) if (ROOT / path).exists())


def render_map(paths: list[Path]) -> str:
    """Return the map as a code block: folders in order, the files of a folder before its folders."""
    lines: list[str] = []
    folders = sorted({path.parent for path in paths} | {ancestor for path in paths for ancestor in path.parents[1:-1]})
    for folder in folders:
        if folder.as_posix() + "/" == RESULTS:
            lines.append(f"{RESULTS:<36} What the benchmarks measured, each with command, commit, versions and hardware.")
            continue
        lines.append(f"{folder.as_posix()}/")
        lines += [f"    {path.name:<32} {first_words(ROOT / path)}" for path in paths if path.parent == folder]
    return "\n".join(["```", *lines, "```", ""])


def main() -> int:
    """Rewrite the map, or with --check compare it: 0 when it is right."""
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    updated = head + BEGIN + render_map(tracked_files()) + END + tail
    if "--check" not in sys.argv:
        DOCUMENT.write_text(updated)
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(text.splitlines(True), updated.splitlines(True), "ARCHITECTURE.md", "make map")
    )
    return int(text != updated)


if __name__ == "__main__":
    sys.exit(main())
