"""The lock beside the database file, between real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.sharding.file_lock import FileLock
from perdure.storage.errors import ConfigurationError, InUseError

pytestmark = pytest.mark.req("CL6")

HOLD = """
import sys
from pathlib import Path
from perdure.sharding.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]), shared=sys.argv[2] == "shared")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds the lock until it is ended."""

    def __init__(self, database: Path, mode: str) -> None:
        command = [sys.executable, "-c", HOLD, str(database), mode]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | PATHS
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"held\n"

    def __enter__(self) -> "Holder":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


PATHS = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_second_process_is_refused_with_the_first_ones_id_and_the_remedy(tmp_path: Path):
    database = tmp_path / "perdure.db"
    with (
        Holder(database, "alone") as holder,
        pytest.raises(
            InUseError, match=f"process {holder.process.pid}:.*PERDURE_RUNNER_STORAGE=sql"
        ),
    ):
        FileLock(database, shared=False).acquire()
    with FileLock(database, shared=False):
        pass  # the other one was killed, which frees the file


def test_sharers_share_and_keep_a_lone_one_out(tmp_path: Path):
    database = tmp_path / "perdure.db"
    with Holder(database, "shared") as one, Holder(database, "shared") as two:
        with FileLock(database, shared=True):
            pass
        with pytest.raises(InUseError) as caught:
            FileLock(database, shared=False).acquire()
        assert str(one.process.pid) in str(caught.value)
        assert str(two.process.pid) in str(caught.value)


def test_a_sharer_is_refused_beside_a_lone_one(tmp_path: Path):
    database = tmp_path / "perdure.db"
    with (
        Holder(database, "alone") as holder,
        pytest.raises(
            InUseError, match=f"process {holder.process.pid} with runner storage 'memory'"
        ),
    ):
        FileLock(database, shared=True).acquire()


def test_one_process_cannot_hold_it_twice_and_names_itself(tmp_path: Path):
    with (
        FileLock(tmp_path / "perdure.db", shared=False),
        pytest.raises(InUseError, match=f"process {os.getpid()}"),
    ):
        FileLock(tmp_path / "perdure.db", shared=False).acquire()


def test_another_name_of_the_same_file_is_the_same_file(tmp_path: Path):
    database = tmp_path / "perdure.db"
    database.touch()
    (tmp_path / "link.db").symlink_to(database)
    with FileLock(database, shared=False), pytest.raises(InUseError):
        FileLock(tmp_path / "link.db", shared=False).acquire()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"absent/perdure\.db\.lock.*must exist"):
        FileLock(tmp_path / "absent" / "perdure.db", shared=False).acquire()
