"""Nothing that lies at the name of a file is written through."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_cachegen.stores.writing import create, open_kept, remove_link

KINDS = ["link", "dangling link", "link to a folder", "second name", "pipe"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What must not change: a folder of one file."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious")
    return folder


def plant(kind: str, elsewhere: Path, place: Path) -> None:
    if kind == "link":
        place.symlink_to(elsewhere / "file")
    elif kind == "dangling link":
        place.symlink_to(elsewhere / "new")
    elif kind == "link to a folder":
        place.symlink_to(elsewhere, target_is_directory=True)
    elif kind == "second name":
        place.hardlink_to(elsewhere / "file")
    elif hasattr(os, "mkfifo"):
        os.mkfifo(place)
    else:
        pytest.skip("no pipes with a name here")


def check(elsewhere: Path) -> None:
    assert os.listdir(elsewhere) == ["file"]
    assert (elsewhere / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_is_kept_is_nobody_elses(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    place = tmp_path / "place"
    plant(kind, elsewhere, place)
    with open_kept(place) as file:
        assert file.read() == b""
        file.write(b"mine")
    assert place.read_bytes() == b"mine"
    assert not place.is_symlink()
    check(elsewhere)


def test_file_that_is_kept_has_its_bytes(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for held in (b"", b"one", b"one, two"):
        with open_kept(place) as file:
            assert file.read() == held
            file.write({b"": b"one", b"one": b", two"}.get(held, b""))
    assert place.read_bytes() == b"one, two"


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="the system cannot refuse links")
@pytest.mark.parametrize("kind", KINDS[:3])
def test_link_that_appears_after_the_look_is_refused(
    tmp_path: Path, elsewhere: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"

    def nothing_there(path: Path) -> os.stat_result:
        plant(kind, elsewhere, place)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "lstat", nothing_there)
    with pytest.raises(OSError, match="place"):
        open_kept(place)
    check(elsewhere)


@pytest.mark.parametrize("kind", KINDS)
def test_new_file_is_not_made_where_something_is(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    place = tmp_path / "place"
    plant(kind, elsewhere, place)
    with pytest.raises(FileExistsError, match="place"):
        create(place)
    check(elsewhere)
    place.unlink()
    with create(place) as file:
        file.write(b"mine")
    assert place.read_bytes() == b"mine"


def test_links_in_the_place_of_a_folder_are_removed(tmp_path: Path, elsewhere: Path) -> None:
    place = tmp_path / "place"
    for kind in KINDS[:3]:
        plant(kind, elsewhere, place)
        remove_link(place)
        assert not os.path.lexists(place)
    remove_link(place)
    remove_link(elsewhere)
    check(elsewhere)
