"""Every error perdure raises, one tree.

    PerdureError
    ├── ConfigurationError            wrong settings, URL, schema, topology: refuses to boot
    │   ├── SchemaError               the database's schema does not fit this code
    │   ├── DisagreementError         all have agreed on something else (shards, lock mode): waiting will not help
    │   ├── InUseError                somebody else holds the file, the port or the name
    │   │   └── PortTaken             the port; may be free a moment later
    │   └── CannotConnect             the database is away, or is not where the URL says: nobody here can tell
    ├── InputError                    refused before anything was written
    ├── StorageError                  made from driver errors, at the engine's edge only
    │   ├── DatabaseUnavailable       transient: nothing was written; may be tried again
    │   ├── ConflictError             transient: the server asked for another try (deadlock, serialization)
    │   ├── UnknownOutcome            the connection went away mid-write: settle before going on (R9)
    │   └── DataRefused               the database refuses this data; another try will not help (R8)
    ├── RunnerDeclaredDead            this runner may write nothing any more; come back as a new one (R2)
    └── RunIdConflict, RunNotFound, … raised by the client (see runtime)

Messages name what was wrong, with which value, and what to do; they never hold a password.
"""

from __future__ import annotations


class PerdureError(Exception):
    """Base of everything perdure raises on purpose."""


class ConfigurationError(PerdureError):
    """The process cannot boot with these settings."""


class SchemaError(ConfigurationError):
    """The database's schema is missing, too old, or needs newer code. The message names the command to run."""


class DisagreementError(ConfigurationError):
    """The cluster has agreed on something else than this process asks for. The message names the setting to change."""


class InUseError(ConfigurationError):
    """A file, port or replica id is held by another live process."""


class PortTaken(InUseError):
    """The runner port is another socket's just now. It may be a pod that is ending, or a connection that was given this
    port by chance: settings that were right yesterday run into it."""


class CannotConnect(ConfigurationError):
    """The database cannot be reached, or takes nobody in just now. It may be back, or the URL may be wrong."""


class InputError(PerdureError):
    """Input was refused before anything was written."""


class StorageError(PerdureError):
    """A database call failed; the subclass says what that means for the data."""


class DatabaseUnavailable(StorageError):
    """Not connected, or the statement never started: certainly nothing was written."""


class ConflictError(StorageError):
    """Rolled back at the server's wish (deadlock victim, serialization failure, lock time-out)."""


class UnknownOutcome(StorageError):
    """The connection or the deadline was lost while a write was under way: it may or may not be committed."""


class DataRefused(StorageError):
    """The database refuses the data itself (encoding, size, constraint)."""


class RunnerDeclaredDead(PerdureError):
    """A peer declared this runner dead. All its runs in memory are void; it may return under a new runner id."""
