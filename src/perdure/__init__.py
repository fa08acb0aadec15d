"""Durable workflows for Python: runs that survive their process, sharing one SQL database."""

__version__ = "0.1.0"
