"""MODULE:CALLABLE on a command line: find the user's function, or an engine."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


def examples_folder() -> Path:
    """Return the folder of the examples: inside an installed package, or beside the package in a clone."""
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples"


def algorithms() -> str:
    """Return the list of the example algorithms for a help page: name, first line of the file, and its only provider.

    Each file names its providers in a sentence of its own, such as "Modal and Tinker." or "Tinker."
    """
    listed = []
    files = sorted((examples_folder() / "algorithms").glob("[a-z]*.py"))
    column = 6 + max(len(file.stem) for file in files)  # 4 spaces before the name, 2 after it
    for file in files:
        text = file.read_text(encoding="utf-8")
        summary = text.partition("\n")[0].strip('"')
        if only := re.search(r"\. (Modal|Tinker)[.,]", text):
            summary += f" Only with --provider {only[1].lower()}."
        listed.append(
            textwrap.fill(summary, 100, initial_indent=f"    {file.stem}".ljust(column), subsequent_indent=" " * column)
        )
    return "\n".join(listed)


def load_module(spec: str, option: str) -> tuple[ModuleType, str]:
    """Import MODULE of ``MODULE:CALLABLE``; return it with the name of the callable.

    Search the current folder first, then the usual places, then the examples. ``option`` is the command-line option
    to name in messages. Raise ValueError if the module cannot be found or imported.
    """
    module_name, _, name = spec.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")) or ".py:" in spec:
        is_path = "/" in module_name or module_name.endswith(".py")
        meant = f"; did you mean {Path(module_name).name.removesuffix('.py')}:{name or 'CALLABLE'}?" if is_path else ""
        raise ValueError(f"{option} is {spec!r}, expected MODULE:CALLABLE, MODULE as it is imported{meant}")
    here, examples = str(Path.cwd()), str(examples_folder())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    if examples not in sys.path:
        sys.path.append(examples)
    try:
        return importlib.import_module(module_name), name
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may also call sys.exit()
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = _hiding_folder(module_name) or _did_you_mean(module_name, _module_names())
            raise ValueError(
                f"{option}: no module {module_name!r} in the current folder or among the examples{hint}"
            ) from None
        says_all = isinstance(error, ImportError) and "pip install" in str(error)
        trace = "" if says_all else f"\n{_users_traceback(error)}"
        raise ValueError(f"{option}: importing {module_name!r} raised {type(error).__name__}: {error}{trace}") from None


def _hiding_folder(module_name: str) -> str:
    """Return a hint if a folder of the user hides the example of this name; otherwise an empty string."""
    package = module_name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    example = examples_folder().joinpath(*module_name.split(".")).with_suffix(".py")
    if file is None or not example.is_file():
        return ""
    return f": {file} hides the {package} of the examples; give that folder another name, or remove its __init__.py"


def _users_traceback(error: BaseException) -> str:
    """Return the traceback from the user's module on, without the frames that import the module."""
    trace = error.__traceback__
    while trace is not None and ("importlib" in (file := trace.tb_frame.f_code.co_filename) or file == __file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace))).rstrip()


def _module_names() -> list[str]:
    """Return the names under which the modules of the current folder and of the examples are imported."""
    folders = [(Path.cwd(), ""), (examples_folder(), ""), (examples_folder() / "algorithms", "algorithms.")]
    return [prefix + file.stem for folder, prefix in folders for file in sorted(folder.glob("*.py"))]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def load_callable(spec: str, option: str) -> Callable[..., Any]:
    """Return the callable that ``MODULE:CALLABLE`` names. Raise ValueError, naming ``option``, if there is none."""
    return callable_of(*load_module(spec, option), option)


def callable_of(module: ModuleType, name: str, option: str) -> Callable[..., Any]:
    """Return the callable ``name`` of a module. Raise ValueError, naming ``option``, if there is none."""
    found = getattr(module, name, None)
    if found is None:
        file = getattr(module, "__file__", None) or "built in"  # shown, because Python's own module may have that name
        meant = _did_you_mean(name, vars(module))
        raise ValueError(f"{option}: module {module.__name__!r} ({file}) has no {name!r}{meant}")
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{option}: {name!r} of {module.__name__!r} is of type {kind}, not callable")
    function: Callable[..., Any] = found
    return function


def require_parameters(function: Callable[..., Any], name: str, arguments: Sequence[str], option: str) -> None:
    """Raise ValueError, naming ``option``, if the function cannot be called with these positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is not written in Python: its first call will show
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        count = {1: "one argument", 2: "two arguments", 4: "four arguments"}[len(arguments)]
        raise ValueError(
            f"{option}: {name}{signature} cannot be called with {count}: ({', '.join(arguments)})"
        ) from None


def optional_callable(
    module: ModuleType, name: str, arguments: Sequence[str], option: str
) -> Callable[..., Any] | None:
    """Return the callable ``name`` of a module, or None if the module has nothing of that name.

    Raise ValueError, naming ``option``, if it cannot be called with these positional arguments.
    """
    if not hasattr(module, name):
        return None
    function = callable_of(module, name, option)
    require_parameters(function, name, arguments, option)
    return function
