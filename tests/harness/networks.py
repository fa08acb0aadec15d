"""Hosts with a network of their own: namespaces of the kernel, each joined to this machine by one cable.

Needs root and iproute2 with iptables. Whatever is started through `Host.prefix` sees only its own end of the cable
and its own loopback; this machine is `Host.gateway` for it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
from functools import cache
from types import TracebackType

_ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=2).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@cache
def missing() -> str | None:
    """Why none can be made here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces can be made by root only"
    lacking = [program for program in ("ip", "iptables") if shutil.which(program) is None]
    if lacking:
        return f"for network namespaces {' and '.join(lacking)} not installed"
    name = f"perdure-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else "this kernel does not let us make network namespaces"


class Host:
    """number: 1 to 250, unique among the hosts of this process. Also a context manager."""

    def __init__(self, number: int) -> None:
        net = f"10.{64 + os.getpid() % 128}.{number}"
        self.gateway, self.address = f"{net}.1", f"{net}.2"
        self.namespace = f"perdure-{os.getpid()}-{number}"
        self._cable = f"pd{os.getpid() % 1_000_000}x{number}"

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]

    def __enter__(self) -> Host:
        atexit.register(self.close)
        _run("ip", "netns", "add", self.namespace)
        _run(
            *("ip", "link", "add", self._cable, "type", "veth"),
            *("peer", "name", "eth0", "netns", self.namespace),
        )
        _run("ip", "addr", "add", f"{self.gateway}/30", "dev", self._cable)
        _run("ip", "link", "set", self._cable, "up")
        _run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", self.namespace, "link", "set", device, "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take it away with its cable; its processes have ended before. Safe to call twice."""
        atexit.unregister(self.close)
        # The namespace would take its end of the cable along, some time later.
        for words in (["link", "del", self._cable], ["netns", "del", self.namespace]):
            subprocess.run(["ip", *words], capture_output=True, check=False)

    def ask(self, url: str) -> int:
        """The status with which a server there answers somebody there, whatever the cable does. Blocks."""
        command = [*self.prefix, sys.executable, "-c", _ASK, url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        if done.returncode != 0:
            raise RuntimeError(f"{url} in {self.namespace}: {done.stderr.strip()}")
        return int(done.stdout)

    def silence(self) -> None:
        """Nothing passes in either direction, and nobody is told: connections are half open."""
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o")):
            _run(*self.prefix, "iptables", "-I", chain, direction, "eth0", "-j", "DROP")

    def unplug(self) -> None:
        """Pull the cable."""
        _run("ip", "link", "set", self._cable, "down")

    def heal(self) -> None:
        """The opposite of both."""
        _run(*self.prefix, "iptables", "-F")
        _run("ip", "link", "set", self._cable, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
