"""Links that the kernel shapes: they keep their rate, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hf_cachegen.bench import kernel_link
from hf_cachegen.bench.kernel_link import KernelLink, check_kernel_links
from hf_cachegen.bench.link import LinkServer, Reset
from hf_cachegen.bench.loopback import Shaper

CONTENT = os.urandom(1 << 20) * 8
GOODPUT = 1448 / 1514
"""Share of TCP's payload in what an Ethernet device sends."""

FAR_TOO_LONG_S = 20.0
"""On an idle machine, what is compared with it takes a second."""


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path


def get(server: LinkServer, size: int, timeout_s: float = FAR_TOO_LONG_S) -> tuple[bytes, float]:
    """The file's first bytes, and the seconds that they took."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout_s)
    with contextlib.closing(connection):
        started = time.perf_counter()
        connection.request("GET", "/file", headers={"Range": f"bytes=0-{size - 1}"})
        return connection.getresponse().read(), time.perf_counter() - started


def seconds_of(server: LinkServer, size: int) -> float:
    """How long it takes to get the file's first bytes, which have to be right."""
    body, seconds = get(server, size)
    assert body == CONTENT[:size]
    return seconds


OverTc = Callable[..., LinkServer]


@pytest.fixture
def over_tc(kernel_links: None, served: Path) -> OverTc:
    """``over_tc(**options)``: a server of :data:`CONTENT` behind a link that tc shapes."""
    return functools.partial(LinkServer, served, shaper=Shaper.tc)


@pytest.mark.parametrize("rate", [2.5e5, 2.5e6, 2.5e7])
def test_rate_holds(over_tc: OverTc, rate: float, lies_between: Any) -> None:
    """From 2 to 200 Mbit/s."""
    size = int(rate * 0.3)
    with over_tc(rate_bytes_per_s=rate) as server:
        assert not server.url.startswith("http://127.")
        shortest_s = size / rate / GOODPUT
        assert lies_between(lambda: seconds_of(server, size), 0.95 * shortest_s, 1.4 * shortest_s)


def test_connections_share_the_link(
    over_tc: OverTc, lies_between: Any, seconds_at_once: Any
) -> None:
    with over_tc(rate_bytes_per_s=2e6) as server:
        measure = functools.partial(seconds_at_once, functools.partial(get, server, 200_000), 4)
        assert lies_between(measure, 0.4 / GOODPUT * 0.95, 1.0)


def test_rate_follows_the_trace_anew_after_each_restart(over_tc: OverTc) -> None:
    """As fast as nothing, then fast: what waits at the slow rate goes on with the fast one."""
    with over_tc(trace=[(0.0, 1e3), (0.3, 1e7), (0.5, 1e6)]) as server:
        for _ in range(2):
            started = time.perf_counter()
            server.link.restart()
            seconds_of(server, 1_000_000)
            assert 0.35 < time.perf_counter() - started < FAR_TOO_LONG_S
        time.sleep(0.5)
        assert seconds_of(server, 300_000) > 0.25  # at the last rate, for ever


@pytest.mark.parametrize(("before", "after"), [(12.5e6, 2.5e6), (12.5e6, 6e5), (2.5e6, 6e5)])
def test_link_goes_on_when_the_rate_falls(over_tc: OverTc, before: float, after: float) -> None:
    """What waits for it then has to fit through the narrower link.

    Once of several times: on a busy machine it may fall late, or the request comes late.
    """
    size = int(0.2 * before + 0.5 * after)
    with over_tc(trace=[(0.0, before), (0.2, after)]) as server:

        def measure() -> float:
            server.link.restart()
            return seconds_of(server, size)

        assert any(0.6 < measure() < 2 for _ in range(10))


def test_link_that_was_down_brings_what_was_asked_for(over_tc: OverTc) -> None:
    with over_tc(trace=[(0.0, 1e6), (0.1, 0.0), (0.4, 1e7)]) as server:
        started = time.perf_counter()
        server.link.restart()
        seconds_of(server, 1_000_000)
        assert 0.4 < time.perf_counter() - started < FAR_TOO_LONG_S


def test_link_without_a_limit(over_tc: OverTc, lies_between: Any) -> None:
    with over_tc() as server:
        server.link.restart()
        assert lies_between(lambda: seconds_of(server, len(CONTENT)), 0, len(CONTENT) / 2.5e7)


def test_faults_are_those_of_any_server(over_tc: OverTc) -> None:
    with over_tc(faults=[Reset(0, 1000)]) as server:
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            get(server, 5000)
        assert get(server, 5000)[0] == CONTENT[:5000]


def test_server_is_left_while_the_link_is_down(over_tc: OverTc) -> None:
    """Neither the client that waits for bytes nor the server that holds them keeps it."""
    failed: list[Exception] = []

    def wait() -> None:
        try:
            get(server, len(CONTENT), timeout_s=1.0)
        except (OSError, http.client.HTTPException) as error:
            failed.append(error)

    with over_tc(rate_bytes_per_s=1e6) as server:
        client = threading.Thread(target=wait)
        client.start()
        time.sleep(0.1)
        server.link.set_rate(0.0)
        time.sleep(0.1)
        started = time.perf_counter()
    assert time.perf_counter() - started < FAR_TOO_LONG_S  # TCP would try for many minutes
    client.join(FAR_TOO_LONG_S)
    assert len(failed) == 1


def test_what_fails_on_the_way_takes_along_what_was_made(
    over_tc: OverTc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command fails once, but the one that takes the devices away."""
    run = kernel_link._run
    made: list[tuple[str, ...]] = []
    fails_at: list[int] = []

    def failing(*command: str, **options: Any) -> None:
        if "delete" not in command:
            if len(made) in fails_at:
                raise OSError("no more of these")
            made.append(command)
        run(*command, **options)

    monkeypatch.setattr(kernel_link, "_run", failing)
    with over_tc(rate_bytes_per_s=1e6) as server:
        assert get(server, 1000)[0] == CONTENT[:1000]
    descriptors, n_commands = os.listdir("/proc/self/fd"), len(made)
    assert n_commands > 5
    for number in range(n_commands):
        made.clear()
        fails_at[:] = [number]
        with pytest.raises(OSError, match="no more of these"), over_tc(rate_bytes_per_s=1e6):
            pass
        assert os.listdir("/proc/self/fd") == descriptors


def test_rate_that_cannot_be_set_is_no_secret(
    over_tc: OverTc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the thread that follows the trace either: what was measured was another link."""
    set_rate, tried = KernelLink.set_rate, threading.Event()

    def set_rate_without_device(link: KernelLink, bytes_per_s: float) -> None:
        if bytes_per_s == 2e6:
            monkeypatch.setattr(kernel_link, "SERVER_DEVICE", "missing0")
            tried.set()
        set_rate(link, bytes_per_s)

    monkeypatch.setattr(KernelLink, "set_rate", set_rate_without_device)
    server = over_tc(trace=[(0.0, 1e6), (0.05, 2e6)]).__enter__()
    assert tried.wait(FAR_TOO_LONG_S)
    with pytest.raises(OSError, match="tc qdisc replace dev missing0"):
        server.__exit__(None, None, None)


def test_process_that_is_killed_leaves_nothing(kernel_links: None, served: Path) -> None:
    """By Ctrl-C in a moment of its own, or by what no process can answer."""
    code = (
        "import signal, sys, time; from hf_cachegen.bench.link import LinkServer, Shaper\n"
        # Ignored by whatever a shell starts in the background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with LinkServer(sys.argv[1], rate_bytes_per_s=1e5, shaper=Shaper.tc):\n"
        "    print('up', flush=True); time.sleep(600)"
    )
    before = set(socket.if_nameindex())
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(served)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in signals
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        assert len(set(socket.if_nameindex()) - before) >= 3
    finally:
        for process, number in zip(processes, signals, strict=True):
            process.send_signal(number)
        for process in processes:
            process.communicate(timeout=60)


def test_latency_is_that_of_the_link(over_tc: OverTc, lies_between: Any) -> None:
    try:
        check_kernel_links(delays=True)
    except OSError as error:
        with pytest.raises(OSError, match="delay packets"), over_tc(latency_s=0.1):
            pass
        pytest.skip(str(error))
    with over_tc(rate_bytes_per_s=1e6, latency_s=0.1) as server:
        # To connect, and to ask.
        assert lies_between(lambda: seconds_of(server, 1), 0.2, 0.4)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of programs that do nothing, the only ones there are."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("ip", "tc", "unshare", "nsenter"):
        (folder / tool).write_text("#!/bin/sh\n")
        (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    kernel_link._missing.cache_clear()
    yield folder
    kernel_link._missing.cache_clear()


@pytest.mark.parametrize("tool", ["ip", "tc", "unshare", "nsenter"])
def test_missing_tool_is_named(tools: Path, served: Path, tool: str) -> None:
    (tools / tool).unlink()
    with pytest.raises(OSError, match=f"'{tool}' is not installed; run as root.*bucket"):
        check_kernel_links()
    with pytest.raises(OSError, match="not installed"), LinkServer(served, shaper=Shaper.tc):
        pass


def test_missing_right_is_told(tools: Path, served: Path) -> None:
    (tools / "unshare").write_text("#!/bin/sh\necho not permitted >&2; exit 1")
    with (
        pytest.raises(OSError, match="not permitted; run as root"),
        LinkServer(served, shaper=Shaper.tc),
    ):
        pass


def test_missing_delays_matter_to_links_with_a_latency(tools: Path) -> None:
    (tools / "unshare").write_text('#!/bin/sh\ncase "$*" in *netem*) exit 1; esac')
    check_kernel_links()
    with pytest.raises(OSError, match=r"netem delay.*modprobe sch_netem.*bucket") as raised:
        check_kernel_links(delays=True)
    assert "run as root" not in str(raised.value), "nothing else is missing"


def test_trace_is_checked_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="expected a trace"):
        KernelLink([(0.0, 5.0), (2.0, 0.0)])
