"""Nodes of a cluster on one machine: each has a network namespace and a filesystem of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.support.small_filesystems import small_filesystem
from tests.support.small_filesystems import why_not as why_no_filesystem

ROOT = Path(__file__).resolve().parents[2]
_NETWORK = "10.213.7"
_PORT = 29400
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    # torch 2.13 shares one store between the restarts of a job, and tells its address only once: a
    # node that joins later waits for it until a timeout ends the job.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Node:
    """A node.

    Args:
        number: from 0.
        disk: its filesystem, which its processes see as ``shared``.
        shared: an empty directory, the same on all nodes.
        log: what its processes print.
    """

    def __init__(self, number: int, disk: Path, shared: Path, log: IO[bytes]) -> None:
        self.disk = disk
        self._number = number
        self.address = f"{_NETWORK}.{number + 1}"
        self._name = f"tierstore-{os.getpid()}-{number}"
        self._shared = shared
        self._log = log
        self._agents: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self._name)

    def connect(self, other: Node) -> None:
        """Lay a cable to another node."""
        ends = [f"ts{os.getpid()}{end}" for end in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, end in zip((self, other), ends, strict=True):
            _ip("link", "set", end, "netns", node._name, "name", "eth0")
            _ip("-n", node._name, "address", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", node._name, "link", "set", "lo", "up")
            _ip("-n", node._name, "link", "set", "eth0", "up")

    def start(self, module: str, *arguments: str, nodes: int) -> None:
        """Start ``torchrun`` of one rank on this node, in a job of so many nodes."""
        program = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"),
            *("--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-id=job-of-{nodes}"),
            *(f"--rdzv-endpoint={_NETWORK}.1:{_PORT}", f"--local-addr={self.address}"),
            f"--rdzv-conf=is_host={self._number == 0}",  # Both have the name of this machine.
            *("--max-restarts=9", "--monitor-interval=0.2", "-m", module, *arguments),
        ]
        # A namespace of `ip netns exec` has mounts of its own.
        mounted = ["bash", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
        where = [str(self.disk), str(self._shared)]
        self._agents.append(
            subprocess.Popen(
                ["ip", "netns", "exec", self._name, *mounted, *where, *program],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
                stdout=self._log,
                stderr=self._log,
            )
        )

    def pids(self, text: str = "") -> list[int]:
        """Return the processes of this node whose command line has a text."""
        found = map(int, _ip("netns", "pids", self._name).split())
        return [pid for pid in found if text in _command_line(pid)]

    def kill(self, pids: Sequence[int] | None = None) -> None:
        """Kill these processes with -9; None: all, as when a node loses its power."""
        for pid in pids or ():
            os.kill(pid, signal.SIGKILL)
        if pids is None:
            while running := self.pids():  # One may start another meanwhile.
                for pid in running:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for agent in self._agents:
                agent.wait()
            self._agents.clear()

    def wait(self) -> int:
        """Return the exit code of the last agent, when it has ended."""
        return self._agents[-1].wait()

    def end(self) -> None:
        """Kill all processes, and remove the namespace with its end of the cable."""
        self.kill()
        _ip("netns", "delete", self._name)


@contextmanager
def two_nodes(scratch: Path) -> Iterator[tuple[tuple[Node, Node], Path]]:
    """Yield two nodes, and the directory at which each has its filesystem."""
    shared = scratch / "shared"
    shared.mkdir()
    with ExitStack() as stack:
        log = stack.enter_context((scratch / "log").open("wb"))
        nodes = []
        for number in range(2):
            folder = scratch / f"node-{number}"
            folder.mkdir()
            disk = stack.enter_context(small_filesystem("ext4", folder, "disk"))
            node = Node(number, disk.point, shared, log)
            stack.callback(node.end)
            nodes.append(node)
        nodes[0].connect(nodes[1])
        yield (nodes[0], nodes[1]), shared


def why_not() -> str:
    """Return why there can be no nodes here; "" where there can."""
    if shutil.which("ip") is None:
        return "ip of iproute2 is not installed"
    name = f"tierstore-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        _ip("link", "add", f"ts{os.getpid()}", "type", "veth")
        _ip("link", "delete", f"ts{os.getpid()}")
    except OSError as error:
        return f"no network namespace can be made: {error}"
    return why_no_filesystem("ext4")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # It has ended.
        return ""
