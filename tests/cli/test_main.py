"""The root: help, quick starts, exit codes and one-line errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_cachegen.cli import app

COMMAND = Path(sys.executable).with_name("hf-cachegen")


def test_help_shows_what_it_is_and_how_to_begin(run):
    text = run("--help")
    assert run() == text
    assert text.count("  hf-cachegen ") == 3
    for command in ("encode", "generate", "plan", "bench"):
        assert command in text


@pytest.mark.parametrize(
    "command",
    [
        *("encode", "profile", "info", "verify", "push", "fetch", "generate", "plan"),
        *("bench codec", "bench entropy"),
    ],
)
def test_every_command_explains_itself(run, command):
    assert "Usage: " in run(*command.split(), "--help")


@pytest.mark.parametrize("arguments", [["--help"], ["encode", "--help"], ["info", "{encoded}"]])
def test_light_commands_import_nothing_heavy(encoded, arguments):
    arguments = [argument.format(encoded=encoded) for argument in arguments]
    script = (
        "import sys\nfrom hf_cachegen.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numba')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["encore"], "No such command 'encore'"),
        (["bench"], "Missing command"),
        (["info", "--nonsense"], "--nonsense"),
        (["encode"], "Missing argument 'MODEL'"),
        (["encode", "model", "--text", "no.txt", "-o", "x"], "no.txt"),
        (["generate", "model", "cache"], "--question"),
        (["verify", "no-such-folder"], "existing folder"),
        (["plan", "./no-model", "--context", "9", "--link-gbps", "1"], "no-model"),
        (["encode", "./no-model", "--text", "{document}", "-o", "x"], "no-model"),
    ],
)
def test_a_mistake_is_one_line(refuse, document, arguments, words):
    assert words in refuse(*(argument.format(document=document) for argument in arguments))


def test_debug_lets_the_traceback_through(tmp_path):
    result = CliRunner().invoke(app, ["--debug", "verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "cache.json" in str(result.exception)


def test_the_installed_command(tmp_path):
    done = subprocess.run(
        [COMMAND, "verify", tmp_path / "nothing"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_ends_with_130():
    script = (
        # A shell starts background jobs with the signal ignored, and their children inherit that.
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import hf_cachegen.cli.inspect as inspect\n"
        "inspect._installation = lambda: os.kill(os.getpid(), signal.SIGINT) or signal.pause()\n"
        "from hf_cachegen.cli import app\napp(['info'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in done.stderr
