"""Imports between the rooms of the package point one way: loop → lifecycle → client → operations → transport."""

import ast
from pathlib import Path

import pytest

import whitney_loop

PACKAGE = Path(whitney_loop.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each room and the rooms that it may import; a room is a module or a folder of the package.
MAY_IMPORT = {
    # leaves
    "advantages": set(),
    "callables": set(),
    "datums": set(),
    "errors": set(),
    "losses": set(),
    "wire": set(),
    "version": set(),
    # the JSON primitives, and payloads built from them
    "payloads": {"losses"},
    "build_loss": {"datums", "payloads"},
    # the client's side
    "connections": {"errors"},
    "transport": {"connections", "errors", "version", "wire"},
    "waiting": {"errors", "wire"},
    "operations": {"waiting", "transport", "connections", "errors", "wire"},
    "fetching": {"operations", "waiting", "connections", "errors"},
    "results": {"errors", "wire"},
    "client": {"fetching", "operations", "waiting", "transport", "errors", "wire"},
    "lifecycle": {"client", "errors", "wire"},
}
CLIENT_SIDE = {"connections", "transport", "waiting", "operations", "fetching", "client", "lifecycle"}
WHOLE_PACKAGE = "__init__"  # "import whitney_loop" imports the client's side


def imports_of(source, module):
    """Return the rooms that a module of the package, such as loop/place, imports, also inside functions."""
    tree = ast.parse(source)
    for_types_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names = []
    for node in ast.walk(tree):
        if node in for_types_only:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            folder = ["whitney_loop", *module.split("/")][: -node.level] if node.level else []
            origin = ".".join([*folder, *([node.module] if node.module else [])])
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return {room_of(name) for name in names if name.split(".")[0] == "whitney_loop"}


def room_of(name):
    """Return the room of a dotted name: whitney_loop.errors.redacted is in errors."""
    room = name.split(".")[1] if "." in name else WHOLE_PACKAGE
    is_room = (PACKAGE / f"{room}.py").exists() or (PACKAGE / room).is_dir() or room in MAY_IMPORT
    return room if is_room else WHOLE_PACKAGE  # else it is a name that __init__ re-exports


@pytest.mark.parametrize(
    ("source", "module", "rooms"),
    [
        ("import json, urllib.request", "client", set()),
        ("import whitney_loop", "client", {WHOLE_PACKAGE}),
        ("import whitney_loop.local.server", "client", {"local"}),
        ("from whitney_loop import wire, errors", "client", {"wire", "errors"}),
        ("from whitney_loop import WhitneyClient", "loop/place", {WHOLE_PACKAGE}),
        ("from whitney_loop.local import serve", "client", {"local"}),
        ("def f():\n    from whitney_loop.local import serve", "client", {"local"}),
        ("from . import wire", "client", {"wire"}),
        ("from .local import serve", "client", {"local"}),
        ("from ..local import serve", "loop/place", {"local"}),
        ("from . import signals", "loop/place", {"loop"}),
        ("from .. import local", "loop/place", {"local"}),
        ("if TYPE_CHECKING:\n    from whitney_loop.client import WhitneyClient", "build_loss", set()),
    ],
)  # fmt: skip
def test_imports_of_every_form_are_read(source, module, rooms):
    assert imports_of(source, module) == rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_what_its_room_may(path):
    module = path.relative_to(PACKAGE).with_suffix("").as_posix()
    room = module.split("/")[0]
    imported = imports_of(path.read_text(encoding="utf-8"), module) - {room}
    if room in MAY_IMPORT:
        assert imported <= MAY_IMPORT[room]
    elif room == "local":
        assert not imported & {*CLIENT_SIDE, "loop", WHOLE_PACKAGE}
    elif room == "loop":
        assert module == "loop/place" or "local" not in imported
    elif room == WHOLE_PACKAGE:
        assert not imported & {"local", "loop"}
    else:
        assert room == "__main__", f"{room} is a new room: say in MAY_IMPORT which rooms it may import"
