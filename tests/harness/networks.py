"""Hosts with a network of their own: namespaces of the kernel, each joined to this machine by one cable.

Needs root and iproute2 with iptables. Whatever is started through `Host.prefix` sees only its own end of the cable
and its own loopback; this machine is `Host.gateway` for it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from types import TracebackType

MISSING = "network namespaces cannot be made here (root, iproute2 and iptables are needed)"


def available() -> bool:
    """Whether this machine lets us make one."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("iptables") is None:
        return False
    name = f"perdure-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


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
