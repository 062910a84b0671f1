"""The error tree is drawn as it is, and each kind of failure has its own exit code."""

import inspect
import re

import infinity.errors
from infinity.errors import InfinityError

CLASSES = dict(inspect.getmembers(infinity.errors, inspect.isclass))
ERRORS = {name: value for name, value in CLASSES.items() if issubclass(value, InfinityError)}


def test_every_kind_of_error_has_its_own_exit_code() -> None:
    """The direct children of InfinityError differ in exit code; none of them is 0 or the root's 1."""
    codes = [error.exit_code for error in ERRORS.values() if InfinityError in error.__bases__]
    assert len(set(codes)) == len(codes)
    assert not {0, 1} & set(codes)


def test_the_drawn_tree_is_the_real_one() -> None:
    """The docstring of infinity.errors names every class, its parent by indentation, and its exit code."""
    drawn: dict[str, tuple[str, int | None]] = {}
    parents: list[tuple[int, str]] = []
    for line in (infinity.errors.__doc__ or "").splitlines():
        match = re.match(r"^([| `-]*)([A-Z]\w+)(?: \([\w, ]+\))?\s*(\d+)?", line)
        if match is None or match[2] not in ERRORS:
            continue
        depth = len(match[1])
        parents = [entry for entry in parents if entry[0] < depth]
        drawn[match[2]] = (parents[-1][1] if parents else "", int(match[3]) if match[3] else None)
        parents.append((depth, match[2]))
    assert drawn.keys() == ERRORS.keys()
    for name, (parent, code) in drawn.items():
        assert not parent or issubclass(ERRORS[name], ERRORS[parent]), name
        assert code is None or ERRORS[name].exit_code == code, name
