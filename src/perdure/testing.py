"""For the tests of an application: run its workflows in process, over a database in memory.

`running` is a context manager, `run_workflow` a pytest fixture (``pytest_plugins = ["perdure.testing"]``). Importing
this module needs pytest.
"""

from perdure.runtime.testing import run_workflow, running

__all__ = ["run_workflow", "running"]
