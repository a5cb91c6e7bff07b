"""The root: help, quick starts, exit codes and one-line errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from tqdm import tqdm
from typer.testing import CliRunner

from hf_cachegen.cli import app, bench, inspect

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
        (["simulate", "--policy", "fastest"], "unknown policy 'fastest'"),
        (["simulate", "--plot", "no-such-folder/x.png"], "existing folder, got no-such-folder"),
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


def number_options() -> Iterator[tuple[tuple[str, ...], str]]:
    """(command, option) for every option of a command that takes numbers."""
    for prefix, commands in (((), app), (("bench",), bench.app)):
        for command in commands.registered_commands:
            words = (*prefix, command.name or command.callback.__name__)
            hints = get_type_hints(command.callback, include_extras=True)
            for name, hint in hints.items():
                kinds = {hint, *get_args(hint)}
                kinds |= {kind for outer in kinds for kind in get_args(outer)}
                kinds |= {kind for outer in kinds for kind in get_args(outer)}
                if kinds & {int, float}:
                    yield words, "--" + name.replace("_", "-")


OF_0_OR_MORE = {"--seed", "--latency-ms"}


def test_there_are_options_that_take_numbers():
    found = set(number_options())
    for command, option in (("plan", "--link-gbps"), ("encode", "--chunk-tokens")):
        assert ((command,), option) in found
    assert (("bench", "stream"), "--link-mbps") in found


@pytest.mark.parametrize(("command", "option"), sorted(number_options()))
def test_numbers_that_make_no_sense_are_refused_by_name(refuse, command, option):
    zero = () if option in OF_0_OR_MORE else ("0", "-0.0")
    for number in ("inf", "-inf", "nan", "-1", "-1e-9", "1e999", "many", "", *zero):
        assert f"'{option}'" in refuse(*command, option, number)


def run_interruptible(script: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python code that ends itself with an interrupt."""
    # A shell starts background jobs with the signal ignored, and their children inherit that.
    heed = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run([sys.executable, "-c", heed + script], capture_output=True, timeout=60)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_ends_with_130():
    done = run_interruptible(
        "import hf_cachegen.cli.inspect as inspect\n"
        "inspect._installation = lambda: os.kill(os.getpid(), signal.SIGINT) or signal.pause()\n"
        "from hf_cachegen.cli import app\napp(['info'])"
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == b"hf-cachegen: interrupted\n"


INTERRUPTED_IMPORT = """
import runpy, sys
sys.argv[1:] = ["info"]

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
runpy.run_path({command!r}, run_name="__main__")
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("module", ["hf_cachegen.cli", "typer", "numpy", "hf_cachegen.cli.app"])
def test_an_interrupt_while_modules_are_imported_ends_with_130(module):
    script = INTERRUPTED_IMPORT.format(module=module, command=str(COMMAND))
    done = run_interruptible(script)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", b"")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_before_the_command_is_known_ends_with_130():
    done = run_interruptible(
        "import typer.main\n"
        "typer.main.get_command = lambda app: os.kill(os.getpid(), signal.SIGINT)\n"
        "from hf_cachegen.__main__ import main\nmain()"
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, b"")


def test_an_interrupt_is_told_after_the_bars(monkeypatch):
    def interrupted(*arguments):
        for _ in tqdm(range(2), "encode"):
            raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "_installation", interrupted)
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 130
    assert result.stderr.endswith("\nhf-cachegen: interrupted\n")
