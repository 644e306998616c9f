"""Imports go down only, as the table of rooms in ARCHITECTURE.md says; importing us is quiet.

The table has the header ``| file | job | imports |``: a module or package of stepclock_ext, what
it is for, and which of the others it may import (or "nothing"). A package covers its files. Files
of more than 300 lines stand, with the reason, in a table of the header ``| long file | reason |``.
"""

import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stepclock_ext"
MAX_LINES = 300
SOURCES = ["stepclock_ext/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h", "csrc/**/*.cu", "csrc/**/*.cuh"]
SOURCES += ["tests/**/*.py", "tests/**/*.h", "tests/**/*.cpp", "bench/**/*.py", "gpu/**/*.py"]
SOURCES += ["*.py"]
HEAVY = {"rich", "typer", "yaml", "matplotlib", "triton", "torch._dynamo"}


def read_table(*header):
    """The rows of the table under that header, each a list of cells without backticks."""
    rows, inside = [], False
    for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif tuple(cell.lower() for cell in cells) == header:
            inside = True
        elif inside and set("".join(cells)) - set("-: "):
            rows.append(cells)
    return rows


def room_name(cell):
    """ "backends" for `stepclock_ext/backends/`, "clock" for `clock.py`."""
    return cell.removeprefix("stepclock_ext/").rstrip("/").removesuffix(".py")


@lru_cache
def rooms():
    """What each room may import."""
    table = {}
    for file, _, imports in read_table("file", "job", "imports"):
        names = [room_name(name.strip()) for name in imports.split(",")]
        table[room_name(file)] = set() if names == ["nothing"] else set(names)
    return table


def modules():
    """Every module by its dotted path inside the package, "" for the package's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module):
    """The row that covers `module`: its own, or that of the nearest package around it."""
    name = module.replace(".", "/") or "__init__"
    while name not in rooms() and "/" in name:
        name = name.rpartition("/")[0]
    return name


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_nodes(tree):
    """Import statements that run, wherever they stand."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif is_type_checking(node):
            yield from (n for part in node.orelse for n in import_nodes(ast.Module([part], [])))
        else:
            yield from import_nodes(node)


def imported_modules(module, path, known):
    """Our own modules that `module` imports."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            bases = [(alias.name, None) for alias in node.names]
        elif node.level:
            above = [part for part in package if part][: len(package) - node.level + 1]
            base = ".".join(["stepclock_ext", *above, *filter(None, [node.module])])
            bases = [(base, alias.name) for alias in node.names]
        else:
            bases = [(node.module, alias.name) for alias in node.names]
        for base, name in bases:
            if base == "stepclock_ext" or base.startswith("stepclock_ext."):
                inside = base.removeprefix("stepclock_ext").removeprefix(".")
                longer = ".".join(filter(None, [inside, name]))
                yield longer if longer in known else inside


def imports_of_rooms():
    """Which rooms each room imports."""
    known = modules()
    found = {}
    for module, path in known.items():
        targets = {room_of(target) for target in imported_modules(module, path, known)}
        found.setdefault(room_of(module), set()).update(targets)
    return {room: targets - {room, "_C"} for room, targets in found.items()}


def test_every_module_has_a_row():
    missing = [module or "__init__" for module in modules() if room_of(module) not in rooms()]
    assert missing == []


def test_every_row_is_a_module_or_a_package():
    here = {room_of(module) for module in modules()}
    assert set(rooms()) - here == set()
    named = set().union(*rooms().values())
    assert named - set(rooms()) == set()


def test_a_room_imports_only_what_its_row_allows():
    stray = {room: found - rooms().get(room, set()) for room, found in imports_of_rooms().items()}
    assert {room: names for room, names in stray.items() if names} == {}


def test_a_row_allows_only_what_its_room_imports():
    unused = {room: rooms().get(room, set()) - found for room, found in imports_of_rooms().items()}
    assert {room: names for room, names in unused.items() if names} == {}


def test_no_chain_of_imports_comes_back():
    left = {room: set(targets) for room, targets in rooms().items()}
    while left:
        lowest = {room for room, targets in left.items() if not targets & left.keys()}
        assert lowest, f"these rooms import each other in a circle: {sorted(left)}"
        left = {room: targets for room, targets in left.items() if room not in lowest}


def test_importing_the_package_prints_nothing_and_loads_nothing_heavy():
    code = f"import sys, stepclock_ext; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("\n", "")


def long_files():
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES:
                yield str(path.relative_to(ROOT))


def test_no_file_is_long_without_a_reason():
    listed = {file for file, reason in read_table("long file", "reason") if reason}
    assert set(long_files()) - listed == set()


def test_no_reason_is_given_for_a_file_that_is_not_long():
    listed = {file for file, _ in read_table("long file", "reason")}
    assert listed - set(long_files()) == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from . import ops, arguments", {"ops", "arguments"}),
        ("from .backends.contract import Layout", {"backends.contract"}),
        ("from .backends import native", {"backends.native"}),
        ("import stepclock_ext.clock", {"clock"}),
        ("def f():\n    from stepclock_ext import norm", {"norm"}),
        ("from stepclock_ext import ClockedOptimizer", {""}),
        ("import torch\nfrom stepclock_extra import x", set()),
        ("if TYPE_CHECKING:\n    from .optimizer import ClockedOptimizer", set()),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from . import fence", {"fence"}),
    ],
)
def test_imports_are_read_in_every_form(tmp_path, source, expected):
    path = tmp_path / "window.py"
    path.write_text(source, encoding="utf-8")
    known = [
        "ops",
        "arguments",
        "backends",
        "backends.contract",
        "backends.native",
        "norm",
        "fence",
    ]
    assert set(imported_modules("window", path, known)) == expected
