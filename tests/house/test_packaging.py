"""What a user installs is what the checkout holds, although the package is made of symlinks."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("cdc", "cron", "runtime", "sharding", "storage")
CARRIED = {".py", ".sql", ".mako", ".ini", ".typed"}


def tracked_files(checkout: Path) -> set[str]:
    """The files of the package that git knows, by their name inside a wheel."""
    listing = subprocess.run(
        ["git", "ls-files", *FLOORS, "src/perdure"],
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    names = (Path(line) for line in listing.stdout.splitlines())
    return {
        str(name.relative_to("src") if name.parts[0] == "src" else Path("perdure") / name)
        for name in names
        if name.suffix in CARRIED
    }


def test_each_floor_is_a_symlink_of_the_package():
    for floor in FLOORS:
        link = ROOT / "src" / "perdure" / floor
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / floor


@pytest.mark.slow
@pytest.mark.req("OP4")
def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            tmp_path,
            copy,
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("perdure-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == tracked_files(copy)
    assert "perdure/py.typed" in held
