"""The command line: ``perdure …`` and ``python -m perdure …``."""

from perdure.runtime.cli.entry import main

__all__ = ["main"]
