"""Links that lie in a folder before a command writes to it are not written through."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_cachegen.cli import app

Names = set[str]


class Opened:
    """Which files below a folder this process opens for writing."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._names: Names = set()
        sys.addaudithook(self._note)  # which stays for good

    def during(self, folder: Path, work: Callable[[], object]) -> Names:
        self._folder, self._names = f"{folder}{os.sep}", set()
        try:
            work()
        finally:
            self._folder = None
        return self._names

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._folder is None or event != "open":
            return
        path, _, flags = arguments
        place = str(path)
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes and place.startswith(self._folder):
            self._names.add(place.removeprefix(self._folder))


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture(
    params=["encode", "encode --into", "profile", "fetch", "fetch a table", "push", "push a table"]
)
def command(
    request: pytest.FixtureRequest, encoded: Path, tiny_model_folder: Path, document: Path
) -> Callable[[Path], list[object]]:
    """``command(folder)``: the arguments of a command that writes to a folder and below it."""
    (table,) = (encoded / "table").iterdir()
    encode = ["encode", tiny_model_folder, "--text", document]
    profile = ["profile", tiny_model_folder, "--text", document, "--sample-tokens", 100]

    def arguments(folder: Path) -> list[object]:
        if request.param == "encode":
            return [*encode, "-o", folder / "out"]
        if request.param == "encode --into":
            return [*encode, "--into", folder]
        if request.param == "profile":
            return [*profile, "-o", folder / "out", "--codecs", "delta", "--max-samples", 2]
        what = table if "table" in request.param else encoded
        if "fetch" in request.param:
            return ["fetch", what, "-o", folder / "out"]
        hub = request.getfixturevalue("hub")
        shutil.copytree(what, folder / "out", dirs_exist_ok=True)
        return ["push", folder / "out", "me/it", "--endpoint", hub.endpoint, "--token", hub.token]

    return arguments


def invoke(arguments: list[object]) -> int:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, (SystemExit, type(None))), repr(result.exception)
    return result.exit_code


def test_links_are_not_written_through(
    command: Callable[[Path], list[object]], opened: Opened, tmp_path: Path
) -> None:
    names = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        arguments = command(folder)
        names.append(opened.during(folder, lambda a=arguments: invoke(a)))
    assert names[0]
    elsewhere = tmp_path / "elsewhere"
    for number, name in enumerate(sorted(names[0] & names[1])):  # those that can be foreseen
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        elsewhere.write_bytes(b"precious")
        (folder / name).symlink_to(elsewhere)
        invoke(command(folder))
        assert elsewhere.read_bytes() == b"precious", name


@pytest.mark.parametrize("kind", ["cache", "table"])
def test_a_card_replaces_a_link(run, hub, encoded, tmp_path, kind):
    """As in a snapshot of the Hugging Face cache, whose files are links."""
    (table,) = (encoded / "table").iterdir()
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    shutil.copytree(encoded if kind == "cache" else table, folder)
    (folder / "README.md").symlink_to(elsewhere)
    run("push", folder, "me/it", "--endpoint", hub.endpoint, "--token", hub.token)
    assert not elsewhere.exists()
    assert not (folder / "README.md").is_symlink()
    assert "hf-cachegen" in (folder / "README.md").read_text()
