"""Run `bodies.check_seeded` under another Python: ``pythonX.Y tests/unit/body/elsewhere.py COUNT``.

The body needs nothing but the standard library, so another interpreter needs no installed packages; the package's own
``__init__`` would import the rest of the product, so bare packages stand in for it. Where hypothesis can be
imported too, bodies it draws are checked as well.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[3]


def bare_package(name: str) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT / "src" / name.replace(".", "/"))]
    sys.modules[name] = package


def main(count: int) -> None:
    for name in ("perdure", "perdure.runtime", "perdure.storage"):
        bare_package(name)
    sys.path.insert(0, str(ROOT))
    bodies = importlib.import_module("tests.unit.body.bodies")
    version = f"Python {sys.version.split()[0]}"
    print(f"{version}: replay is exact for {count} big bodies: {bodies.check_seeded(range(count))}")
    try:
        tests = importlib.import_module("tests.simulation.test_replay_property")
    except ModuleNotFoundError as missing:
        print(f"{version}: no drawn bodies, {missing}")
        return
    tests.property_test(count)()
    print(f"{version}: replay is exact for {count} drawn bodies")


if __name__ == "__main__":
    main(int(sys.argv[1]))
