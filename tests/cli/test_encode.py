"""Many documents: shared by processes, encoded once each, whatever happens to the others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import filelock
import psutil
import pytest
from typer.testing import CliRunner

from hf_cachegen.cli import app
from hf_cachegen.cli.sharing import CLAIMS_FOLDER, share

N_DOCUMENTS = 16
SETTINGS = ("--chunk-tokens", 50)
LAUNCH_S = 120


@pytest.fixture
def corpus(tmp_path: Path, tiny_text: str) -> list[Path]:
    """Documents of different length, none of which begins another."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(N_DOCUMENTS):
        text = f"Document {number}.\n{tiny_text[: 400 + 100 * number]}"
        (folder / f"document-{number}.txt").write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of the artefacts in a folder, without locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name != ".lock"
    }


def written_at(folder: Path) -> dict[str, int]:
    """When each artefact in a folder was finished, ns."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/cache.json")}


def encode(*arguments: object) -> object:
    """Run ``encode`` in this process, whatever its exit status."""
    return CliRunner().invoke(app, ["encode", *map(str, arguments)])


@contextlib.contextmanager
def launched(*launch: object, encode: tuple[object, ...]) -> Iterator[subprocess.Popen[str]]:
    """``accelerate launch`` of the command; whatever is left of it at the end is killed."""
    options = ("--mixed_precision", "no", "--dynamo_backend", "no", "--multi_gpu")
    command = (Path(sys.executable).with_name("accelerate"), "launch", *options, *launch)
    process = subprocess.Popen(
        [*map(str, command), "-m", "hf_cachegen", "encode", *map(str, encode)],
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for running in (*workers(process), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                running.kill()
        process.communicate()


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a launcher has started."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_launched_killed_and_launched_again(run, tmp_path, corpus, tiny_model_folder, monkeypatch):
    out = tmp_path / "caches"
    arguments = (tiny_model_folder, *SETTINGS, "--into", out, "--text", *corpus)
    # Nobody writes into this pipe, so that whoever reads it is not done before he is killed.
    text = corpus[0].read_bytes()
    corpus[0].unlink()
    os.mkfifo(corpus[0])
    with launched("--num_processes", 2, "--main_process_port", 0, encode=arguments) as first:
        deadline = time.monotonic() + LAUNCH_S
        while not written_at(out) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        victim = next(worker for worker in workers(first) if "hf_cachegen" in worker.cmdline())
        victim.send_signal(signal.SIGKILL)
        assert first.wait(LAUNCH_S) != 0
    corpus[0].unlink()
    corpus[0].write_bytes(text)
    before = written_at(out)
    assert 0 < len(before) < N_DOCUMENTS

    bad = corpus[0].with_name("latin.txt")
    bad.write_bytes("Café".encode("latin-1"))
    machines = ("--num_machines", 2, "--num_processes", 2, "--main_process_ip", "127.0.0.1")
    machines += ("--main_process_port", free_port(), "--machine_rank")
    with (
        launched(*machines, 0, encode=(*arguments, bad)) as main,
        launched(*machines, 1, encode=(*arguments, bad)) as other,
    ):
        (stdout, stderr), (silent, quiet) = (
            process.communicate(timeout=LAUNCH_S) for process in (main, other)
        )
    assert main.returncode != 0 != other.returncode
    told = re.search(r"(\d+) caches? written, (\d+) already there", stdout)
    assert told is not None
    assert tuple(map(int, told.groups())) == (N_DOCUMENTS - len(before), len(before))
    assert silent == ""
    assert stderr.count("latin.txt: expected UTF-8") == stderr.count("hf-cachegen: error") == 1
    assert "document/s" in stderr
    assert "document/s" not in quiet
    after = written_at(out)
    assert before.items() <= after.items()
    assert len(after) == N_DOCUMENTS

    alone = tmp_path / "alone"
    for path in corpus:
        run("encode", tiny_model_folder, *SETTINGS, "--text", path, "-o", alone / path.stem)
    assert files_of(out) == files_of(alone)


def test_only_what_is_new_is_encoded(run, tmp_path, corpus, tiny_model_folder):
    out = tmp_path / "caches"
    arguments = ("encode", tiny_model_folder, *SETTINGS, "--into", out, "--text")
    assert "4 caches written, 0 already there" in run(*arguments, *corpus[:4])
    before = written_at(out)
    assert "1 cache written, 4 already there" in run(*arguments, *corpus[:5])
    assert before.items() <= written_at(out).items()
    one = ("encode", tiny_model_folder, *SETTINGS, "--text", corpus[0], "-o", out / corpus[0].stem)
    assert "already in" in run(*one)
    assert before.items() <= written_at(out).items()


def test_a_failure_keeps_nothing_from_being_done(tmp_path, corpus, tiny_model_folder):
    out = tmp_path / "caches"
    arguments = (tiny_model_folder, "--tables", "none", "--into", out, "--text", *corpus[:3])
    corpus[2].write_text("")
    assert encode(*arguments).exit_code == 1
    assert written_at(out).keys() == {corpus[0].stem, corpus[1].stem}
    corpus[1].write_text("Something else.")
    corpus[2].write_text("Something.")
    result = encode(*arguments)
    assert result.exit_code == 1
    assert "1 cache written, 1 already there" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert f"{corpus[1]}: " in line
    assert "--overwrite" in line
    assert encode(*arguments, "--overwrite").exit_code == 0


def test_a_document_that_another_run_works_on_is_left_to_it(
    run, tmp_path, corpus, tiny_model_folder
):
    claims = tmp_path / "caches" / CLAIMS_FOLDER
    claims.mkdir(parents=True)
    arguments = ("encode", tiny_model_folder, "--into", claims.parent, "--text", *corpus[:2])
    with filelock.FileLock(claims / f"{corpus[1].stem}.lock"):
        stdout = run(*arguments)
    assert "1 cache written" in stdout
    assert "1 document left to another run" in stdout
    assert "1 cache written, 1 already there" in run(*arguments)


@pytest.mark.parametrize("n_processes", [1, 2, 3, 7])
def test_shares_are_even_and_nobody_elses(corpus, n_processes):
    documents = {Path("caches") / path.stem: path for path in corpus}
    shares = [
        share(documents, SimpleNamespace(process_index=index, num_processes=n_processes))
        for index in range(n_processes)
    ]
    assert sorted(path for part in shares for path in part.values()) == corpus
    sizes = [sum(path.stat().st_size for path in part.values()) for part in shares]
    longest = max(path.stat().st_size for path in corpus)
    assert max(sizes) - min(sizes) <= longest


def test_where_to_is_said_once(refuse, tmp_path, corpus, tiny_model_folder):
    model = ("encode", tiny_model_folder, "--text")
    one, many = ("-o", tmp_path / "a"), ("--into", tmp_path / "b")
    assert "got 2 documents with -o" in refuse(*model, *corpus[:2], *one)
    assert "got 1 document with no folder" in refuse(*model, corpus[0])
    assert "got 1 document with -o and --into" in refuse(*model, corpus[0], *one, *many)
    twin = tmp_path / corpus[0].name
    twin.write_text("Something else.")
    assert "rename one" in refuse(*model, corpus[0], twin, *many)


def test_folders_that_would_be_wrong_are_refused(tmp_path, corpus, tiny_model_folder):
    hidden = corpus[0].with_name("..txt")
    hidden.write_text("Something.")
    file = tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        (("--into", tmp_path / "caches", "--text", hidden), "begin with no dot"),
        (("--into", file, "--text", corpus[0]), "is a file"),
    ):
        result = encode(tiny_model_folder, "--tables", "none", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not (tmp_path / "caches").exists()
