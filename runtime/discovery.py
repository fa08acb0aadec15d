"""Finding what an application defines: its ``App`` by ``module:attribute``, its workflows by package.

Only names at module level count. Importing runs the application's own code; what goes wrong there is reported with
the module's name and the line, never swallowed.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import structlog

from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.registry import Registry
from perdure.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.runtime.app import App

PERDURE = Path(__file__).parent

# Endings of module names that promise a definition. Schedules and triggers come with later releases; a module that
# is named for one and defines nothing is just as surprising today.
PROMISES = {"_workflow": "workflow", "_cron": "schedule", "_trigger": "trigger"}

Warn = Callable[[str], None]


class DiscoveryError(ConfigurationError):
    """A module or attribute cannot be found, or importing it failed; the message names it."""


def discover(package: str, registry: Registry, *, warn: Warn | None = None) -> list[str]:
    """Import ``package`` with all its modules and register every workflow at module level.

    Returns the names of the workflows found, in the order of their modules' names. A module named ``*_workflow.py``,
    ``*_cron.py`` or ``*_trigger.py`` that holds no definition is told to ``warn`` (the log if left out) with its path.
    Raises DiscoveryError if a module cannot be imported, ConfigurationError for two definitions with one name.
    """
    tell = warn or structlog.get_logger("perdure.discovery").warning
    found: dict[str, None] = {}
    for module in _modules(package):
        held = [value for value in vars(module).values() if isinstance(value, WorkflowDefinition)]
        for definition in held:
            registry.add(definition)
            found[definition.name] = None
        promised = next((word for end, word in PROMISES.items() if _stem(module).endswith(end)), "")
        if promised and not held:
            tell(
                f"{_path(module)} is named for a {promised} and defines none at module level: "
                "define it there or rename the file"
            )
    return list(found)


def load_app(path: str) -> App:
    """The application behind ``module:attribute``, as in ``app.main:app``; the current folder is importable.

    Raises DiscoveryError naming the module or attribute that is missing, fails to import, or is no App.
    """
    from perdure.runtime.app import App

    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        raise DiscoveryError(
            f"{path!r} names no application: write module:attribute, as in app.main:app"
        )
    make_importable(Path.cwd())
    value: Any = import_module(name)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise DiscoveryError(f"{path}: module {name} has no {attribute}{_apps_in(value, name)}")
        value = getattr(value, part)
    if not isinstance(value, App):
        raise DiscoveryError(
            f"{path} is {_an(type(value).__name__)}, not an App: write app = App(...) there"
        )
    return value


def module_folder(path: str) -> Path | None:
    """The folder of the top-level module of ``module:attribute``, found without importing it; None if not found."""
    make_importable(Path.cwd())
    top = path.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    if not places and spec.has_location and spec.origin is not None:
        places = [spec.origin]
    return Path(places[0]).parent if places else None


def make_importable(folder: Path) -> None:
    """Put ``folder`` in front of the search path unless it is on it."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))


def import_module(name: str) -> ModuleType:
    """Import ``name``. Raises DiscoveryError: not found (saying where it was looked for), or failed at which line."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if it is the module asked for, or a package on the way to it; else it is the application's own import.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise DiscoveryError(
                f"no module named {error.name!r}: looked for {name} in {Path.cwd()} and the Python path; "
                "check the name, or run the command from the folder that holds it"
            ) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _modules(package: str) -> Iterator[ModuleType]:
    root = import_module(package)
    yield root
    names = [
        module.name
        for module in _walk(getattr(root, "__path__", ()), f"{root.__name__}.")
        if module.name.rpartition(".")[2] != "__main__"  # importing that would run a program
    ]
    for name in sorted(names):
        yield import_module(name)


def _walk(paths: Any, prefix: str) -> Iterator[pkgutil.ModuleInfo]:
    """Like `pkgutil.walk_packages`, which would hide a package's own import error behind a half-walked tree."""
    for module in pkgutil.iter_modules(paths, prefix):
        yield module
        if module.ispkg:
            yield from _walk(import_module(module.name).__path__, f"{module.name}.")


def _import_failed(name: str, error: BaseException) -> DiscoveryError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "importlib" not in frame.filename
        and frame.filename != __file__
        and not frame.filename.startswith("<")
    ]
    # A definition that perdure refuses is at fault in the application's line, not in perdure's.
    theirs = [frame for frame in own if PERDURE not in Path(frame.filename).parents] or own
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}:{error.lineno})"
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return DiscoveryError(f"importing {name} failed: {type(error).__name__}: {said}{place}")


def _apps_in(value: Any, name: str) -> str:
    from perdure.runtime.app import App

    if not isinstance(value, ModuleType):
        return ""
    apps = [key for key, held in vars(value).items() if isinstance(held, App)]
    return (
        f"; it has {', '.join(f'{name}:{key}' for key in apps)}"
        if apps
        else "; write app = App(...) there"
    )


def _an(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def _stem(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _path(module: ModuleType) -> str:
    return module.__file__ or module.__name__
