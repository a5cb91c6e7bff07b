"""A link that the kernel shapes: real TCP, with its packets, its congestion control and a queue.

The server's sockets live in a network namespace without a name, which a pair of virtual Ethernet
devices joins to this one, and ``tc`` lets no more than a rate out of it. Namespace and devices last
as long as this process holds the namespace's descriptors, so even a process that is killed leaves
nothing behind; if the link is down then, as soon as TCP gives up what was on its way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from hf_cachegen.bench.loopback import Link, check_trace

ADDRESSES = IPv4Network("198.18.0.0/15")
"""Set aside for benchmarks of networks (RFC 2544); each link takes four of them."""

SERVER_DEVICE = "server0"
MTU_BYTES = 1514  # with the Ethernet header, as the kernel counts
BURST_S = 0.004
"""What may go out at once after a pause: the kernel wakes up late by up to a tick, this long."""
QUEUE_S = 0.1
"""What waits for the link at most. More is dropped, and TCP notices."""
MIN_QUEUE_BYTES = 32 * MTU_BYTES
GREETINGS, GREETING_S = 100, 0.1
"""How often a new link is tried before its first use, and how long each time."""

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_SHAPE = "ip link add probe0 type veth peer name probe1 && tc qdisc add dev probe0 root "
_TBF = "tbf rate 1mbit burst 10kb limit 100kb"
_NETEM = "netem delay 1ms"

# Runs inside the namespace. Sockets belong to the one they were made in, whoever uses them.
_MAKE_SOCKETS = """
import os, socket
listener = socket.create_server(("", 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
with socket.socket(fileno=0) as starter:
    socket.send_fds(starter, [b"."], [listener.fileno(), datagrams.fileno(), namespace])
"""


def check_kernel_links(*, delays: bool = False) -> None:
    """Return if this process can make a :class:`KernelLink` here.

    Parameters
    ----------
    delays
        Also with a latency.

    Raises
    ------
    OSError
        It cannot. The message says what is missing.
    """
    missing = _missing(_TBF)
    if missing is not None:
        raise OSError(
            f"expected a machine where tc can shape a link, found that {missing}; run as root on "
            "Linux with iproute2 and util-linux, or let the server shape its link itself "
            "(--shaper bucket)"
        )
    missing = _missing(_NETEM) if delays else None
    if missing is not None:
        raise OSError(
            f"expected a kernel that can delay packets, found that {missing}; load its module "
            "sch_netem (`modprobe sch_netem`), measure without a latency (--latency-ms 0), or let "
            "the server shape its link itself (--shaper bucket), which delays without the kernel"
        )


class KernelLink(Link):
    """A link to a server in a network namespace of its own, shaped by ``tc``.

    Parameters
    ----------
    trace
        As :class:`~hf_cachegen.bench.loopback.Link` takes it. The rate counts every byte of the
        packets, of which TCP over Ethernet makes 1514 of 1448. Where it is 0, the link is down:
        packets are lost, and TCP tries again after longer and longer waits.
    latency_s
        Round trip to add to that of the queue; needs the kernel's ``netem``.
    """

    def __init__(self, trace: Sequence[tuple[float, float]] | None, latency_s: float = 0.0) -> None:
        check_trace(trace)
        super().__init__(None)
        self._rates = trace or ()
        self._latency_s = latency_s
        self._wire: _Wire | None = None
        self._stack = contextlib.ExitStack()
        self._stop = threading.Event()
        self._followed: Future[None] | None = None

    def listen(self) -> socket.socket:
        """A new socket that listens at the other end of the link.

        Raises
        ------
        OSError
            Such links cannot be made here; see :func:`check_kernel_links`.
        """
        check_kernel_links(delays=self._latency_s > 0)
        with contextlib.ExitStack() as stack:
            listener, wire = _lay_wire(stack)
            if self._latency_s:
                # On the way of the requests, where no rate is kept: the sum is what counts.
                delay = ("netem", "delay", f"{self._latency_s * 1e6:.0f}us", "limit", "100000")
                _run("tc", "qdisc", "add", "dev", wire.device, "root", *delay)
            self._pool = stack.enter_context(ThreadPoolExecutor(1, "kernel-link"))
            self._stack = stack.pop_all()
        self.host, self._wire = str(wire.server), wire
        return listener

    def set_rate(self, bytes_per_s: float) -> None:
        """Let out so much from now on, or for a rate of 0 nothing, until the trace says otherwise.

        Raises
        ------
        OSError
            The rate could not be set.
        """
        assert self._wire is not None, "expected a link that is listened on"
        self._wire.set_rate(bytes_per_s)

    def restart(self) -> None:
        """Begin the trace now.

        Raises
        ------
        OSError
            A rate of the trace could not be set, now or before.
        """
        self._end_trace()
        self._stop = threading.Event()
        if self._rates:
            started_s = time.monotonic()
            self.set_rate(self._rates[0][1])
            self._followed = self._pool.submit(self._follow, self._stop, started_s)

    def close(self) -> None:
        """Remove the devices; what still travels is lost. Raises what :meth:`restart` does."""
        with self._stack:
            self._end_trace()

    def _follow(self, stop: threading.Event, started_s: float) -> None:
        for t_s, rate in self._rates[1:]:
            if stop.wait(started_s + t_s - time.monotonic()):
                return
            self.set_rate(rate)

    def _end_trace(self) -> None:
        self._stop.set()
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.result()


@dataclass(frozen=True)
class _Wire:
    """The two ends: a device here, and :data:`SERVER_DEVICE` in the namespace."""

    device: str
    client: IPv4Address
    server: IPv4Address
    namespace: int
    datagrams: socket.socket

    def run_inside(self, *command: str) -> None:
        namespace = f"--net=/proc/self/fd/{self.namespace}"
        _run("nsenter", namespace, *command, keep=(self.namespace,))

    def set_rate(self, bytes_per_s: float) -> None:
        """Let out so much, or for a rate of 0 nothing at all."""
        if not bytes_per_s:
            self.run_inside("ip", "link", "set", SERVER_DEVICE, "down")
            return
        burst = max(int(BURST_S * bytes_per_s), 2 * MTU_BYTES)
        limit = max(int(QUEUE_S * bytes_per_s), MIN_QUEUE_BYTES)
        bucket = ("rate", f"{max(int(8 * bytes_per_s), 8)}bit", "burst", str(burst))
        self.run_inside(
            *("tc", "qdisc", "replace", "dev", SERVER_DEVICE, "root", "tbf"),
            *(*bucket, "limit", str(limit)),
        )
        self.run_inside("ip", "link", "set", SERVER_DEVICE, "up")
        # The bucket keeps waiting for what it lacks at its old rate until another packet comes.
        self.datagrams.sendto(b"", (str(self.client), 9))


def _lay_wire(stack: contextlib.ExitStack) -> tuple[socket.socket, _Wire]:
    """A namespace with a listening socket, joined to this one; the stack takes all of it away."""
    listener, datagrams, namespace = _make_sockets()
    stack.callback(os.close, namespace)
    stack.enter_context(datagrams)
    stack.enter_context(listener)
    device = f"cachegen-{secrets.token_hex(3)}"
    _run(
        *("ip", "link", "add", device, "type", "veth"),
        *("peer", "name", SERVER_DEVICE, "netns", f"/proc/self/fd/{namespace}"),
        keep=(namespace,),
    )
    # The namespace would take the devices along, but waits for connections that linger.
    stack.callback(_run, "ip", "link", "delete", device)
    client, server = _free_addresses(device)
    wire = _Wire(device, client, server, namespace, datagrams)
    _run("ip", "address", "add", f"{client}/30", "dev", device)
    _run("ip", "link", "set", device, "up")
    wire.run_inside("ip", "address", "add", f"{server}/30", "dev", SERVER_DEVICE)
    # Packets of more than one segment that wait when the rate falls never fit the smaller bucket.
    wire.run_inside("ip", "link", "set", SERVER_DEVICE, "gso_max_segs", "1", "up")
    _await_traffic(wire)
    return listener, wire


def _await_traffic(wire: _Wire) -> None:
    """Return once the ends know each other: a first connection might wait a second for that."""
    with socket.socket(type=socket.SOCK_DGRAM) as here:
        here.bind((str(wire.client), 0))
        here.settimeout(GREETING_S)
        for _ in range(GREETINGS):
            wire.datagrams.sendto(b"", here.getsockname())
            with contextlib.suppress(TimeoutError):
                here.recv(1)
                return
    raise OSError(f"{wire.device} carried nothing for {GREETINGS * GREETING_S:.0f} s")


def _make_sockets() -> tuple[socket.socket, socket.socket, int]:
    """A new namespace: a socket that listens in it, one for datagrams, and its descriptor."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = ("unshare", "--net", sys.executable, "-I", "-S", "-c", _MAKE_SOCKETS)
        _run(*command, stdin=theirs.fileno())
        _, (listener, datagrams, namespace), *_ = socket.recv_fds(
            ours, 1, 3, socket.MSG_CMSG_CLOEXEC
        )
    return socket.socket(fileno=listener), socket.socket(fileno=datagrams), namespace


def _free_addresses(device: str) -> tuple[IPv4Address, IPv4Address]:
    """Two addresses of one subnet, which is a device's own as its number is."""
    number = socket.if_nametoindex(device) % (ADDRESSES.num_addresses // 4)
    return ADDRESSES[4 * number + 1], ADDRESSES[4 * number + 2]


def _run(*command: str, stdin: int = subprocess.DEVNULL, keep: Sequence[int] = ()) -> None:
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, pass_fds=keep)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")


@functools.cache
def _missing(qdisc: str) -> str | None:
    """What keeps this process from shaping a device in a namespace, which the trial takes along."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"the command {tool!r} is not installed"
    try:
        _run("unshare", "--net", "sh", "-c", _SHAPE + qdisc)
    except OSError as error:
        return str(error)
    return None
