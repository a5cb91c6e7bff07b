"""What can be told at once is told at once: before a model is loaded, or runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from hf_cachegen import push_artifact
from hf_cachegen.cli import models
from hf_cachegen.tables import TableRecord


@pytest.fixture
def no_model(monkeypatch):
    """No model can be loaded from now on."""
    monkeypatch.setattr(models, "load_model", None)  # would not be callable


@pytest.fixture(scope="module")
def table(run, tiny_model_folder, document, tmp_path_factory):
    """The folder of a table for ``delta``."""
    folder = tmp_path_factory.mktemp("tables") / "table"
    profile = ("profile", tiny_model_folder, "--text", document, "--sample-tokens", 100)
    run(*profile, "-o", folder, "--codecs", "delta", "--max-samples", 2)
    return folder


@pytest.fixture
def places(tmp_path, document, encoded, table):
    """Names for paths in the arguments of a test."""
    (tmp_path / "file").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    namesake = tmp_path / "notes.txt"
    namesake.write_text("Of the name of a folder.")
    (tmp_path / "link").symlink_to(tmp_path / "notes", target_is_directory=True)
    return {
        "document": document,
        "cache": encoded,
        "table": table,
        "short": short,
        "namesake": namesake,
        "link": tmp_path / "link",
        "new": tmp_path / "new",
        "file": tmp_path / "file",
        "notes": tmp_path / "notes",
        "missing": tmp_path / "missing",
    }


ENCODE = "encode model --text {document}"
PROFILE = "profile model --text {document}"
GENERATE = "generate model {cache} --question ?"
STREAM = "bench stream model --text {document} --table"
BENCH = "bench codec model --text {document} --calibration {short}"
MISTAKES = [
    (f"{ENCODE} -o {{new}} --levels delta-9", "unknown level 'delta-9'; expected some of delta-0"),
    (f"{ENCODE} -o {{new}} --levels delta-1 --tables none", "expected some of lossless, raw"),
    (f"{ENCODE} -o {{new}} --tables {{missing}}", "missing"),
    (f"{ENCODE} -o {{new}} --tables {{notes}}", "table.json"),
    (f"{ENCODE} -o {{file}}", "file is a file"),
    (f"{ENCODE} -o {{file}}/new", "file is a file"),
    (f"{ENCODE} --into {{file}}/new", "file is a file"),
    (f"{ENCODE} -o /dev/null/new", "cannot write to"),
    (f"{ENCODE} -o {{notes}}/{'a' * 300}", "cannot write to"),
    ("encode {notes} --text {document} -o {notes}", "other than the model's"),
    ("encode {notes} --text {document} -o {notes}/../notes/", "other than the model's"),
    ("encode {notes} --text {document} --into {notes}", "other than the model's"),
    ("encode {notes} --text {namesake} --into {notes}/..", "other than the model's"),
    ("encode {link} --text {document} -o {notes} --overwrite", "other than the model's"),
    ("profile {notes} --text {document} -o {notes}", "holds other files"),
    (f"{ENCODE} -o {{new}} --levels ,", "unknown level (none given)"),
    (f"{ENCODE}", "got 1 document with no folder"),
    (f"{PROFILE} -o {{new}} --codecs ,", "unknown (none given)"),
    (f"{PROFILE} -o {{file}}", "file is a file"),
    (f"{PROFILE} -o {{file}}/new", "file is a file"),
    (f"{PROFILE} -o {{notes}}", "holds other files"),
    (f"{PROFILE} -o {{new}} --max-samples 0", "--max-samples"),
    (f"{PROFILE} -o {{new}} --codecs zip", "unknown zip"),
    (f"{GENERATE} --level delta-9", "unknown level 'delta-9'"),
    (f"{GENERATE} --policy fastest", "unknown policy 'fastest'"),
    (f"{GENERATE} --policy paper", "needs a target"),
    (f"{GENERATE} --policy soonest", "lacks its level; expected soonest:<level>"),
    (f"{GENERATE} --policy text --ttft-target 1", "no --ttft-target with policy 'text'"),
    (f"{GENERATE} --ttft-target -1", "above 0"),
    (f"{STREAM} {{table}} --source fast", "unknown source 'fast'"),
    (f"{STREAM} {{table}} --source text fixed:best", "unknown level 'best'"),
    (f"{STREAM} {{table}} --source text:delta-0", "unknown policy 'text:delta-0'"),
    (f"{STREAM} {{table}} --source soonest: layered", "lacks its level"),
    (f"{STREAM} {{table}} --levels delta-9", "unknown level 'delta-9'; expected some of delta-0"),
    (f"{STREAM} {{table}} --levels delta-1 --source fixed:delta-2", "unknown level 'delta-2'"),
    (f"{STREAM} {{table}} --chunk-tokens 9999999", "chunks of 1 to"),
    (f"{STREAM} {{table}} --trace {{short}}", "line 1"),
    (f"{STREAM} {{missing}}", "existing folder"),
    (f"{STREAM} {{notes}}", "table.json"),
    ("generate model {missing} --question ?", "expected an existing folder"),
    ("generate model {notes} --question ?", "cache.json"),
    (f"{BENCH} --codec zip", "unknown codec 'zip'; expected one of transform, delta, lossless"),
    (f"{BENCH} --codecs delta --codec transform", "expected one of delta, lossless, raw"),
    ("bench answers model --text {document} --questions {short} --table {missing}", "question"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES)
def test_a_mistake_is_told_before_a_model_is_loaded(refuse, no_model, places, command, words):
    assert words in refuse(*(word.format(**places) for word in command.split()))
    assert not places["new"].exists()


def test_a_missing_table_of_answers_is_told_before_a_model_is_loaded(
    refuse, no_model, places, tmp_path
):
    questions = tmp_path / "questions.txt"
    questions.write_text("beginning: Who pays?")
    arguments = ("bench", "answers", "model", "--text", places["document"])
    words = refuse(*arguments, "--questions", questions, "--table", places["missing"])
    assert "existing folder" in words


def test_a_repository_without_a_cache_is_told_before_a_model_is_loaded(
    refuse, no_model, hub, encoded, tmp_path, monkeypatch
):
    at = {"endpoint": hub.endpoint, "token": hub.token}
    options = ("--question", "?", "--endpoint", hub.endpoint, "--token", hub.token)
    generate = ("generate", "model", "me/contract", *options)
    assert "no repository" in refuse(*generate)
    for name in ("fastest", "soonest", "paper"):
        assert f"policy '{name}'" in refuse(*generate, "--policy", name)
    assert "no --ttft-target" in refuse(*generate, "--policy", "text", "--ttft-target", 1)
    HfApi(**at).create_repo("me/contract")
    assert "cache.json" in refuse(*generate)
    shutil.copytree(encoded, tmp_path / "push")
    push_artifact(tmp_path / "push", "me/contract", **at)

    def fail(*arguments):
        raise ValueError("this is as far as it goes")

    monkeypatch.setattr(models, "load_model", fail)
    assert "as far as it goes" in refuse(*generate)
    # What were here by now would make the times too good.
    assert not list((tmp_path / "hub-cache").glob("*/blobs/*"))


def test_documents_that_are_too_short_are_told_before_the_profile(
    refuse, places, tiny_model_folder, monkeypatch
):
    monkeypatch.setattr("hf_cachegen.hf.profiling.profile_model", None)
    profile = ("profile", tiny_model_folder, "-o", places["new"], "--text", places["document"])
    assert "1756 tokens" in refuse(*profile, "--evaluate", places["short"])
    bench = ("bench", "codec", tiny_model_folder, "--text", places["short"])
    assert "1756 tokens" in refuse(*bench, "--calibration", places["document"])


def test_a_folder_of_something_else_is_told_before_the_model_runs(
    refuse, encoded, tiny_model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("hf_cachegen.hf.saving.prefill", None)
    other = tmp_path / "other.txt"
    other.write_text("Something else.")
    encode = ("encode", tiny_model_folder, "--text", other, "-o", encoded)
    assert "other tokens" in refuse(*encode)
    assert "--overwrite" in refuse(*encode, "--tables", "none", "--chunk-tokens", 200)


@pytest.mark.parametrize("command", [ENCODE, PROFILE])
def test_a_folder_without_a_name_is_not_the_one_at_hand(refuse, no_model, places, command):
    arguments = [word.format(**places) for word in command.split()]
    line = refuse(*arguments, "-o", "")
    assert "'-o'" in line
    assert "expected the name of a folder" in line


def test_links_that_the_kernel_cannot_shape_are_told_before_a_model_is_loaded(
    refuse, no_model, places, monkeypatch
):
    def check(*, delays=False):
        if delays:
            raise OSError("no netem")

    monkeypatch.setattr("hf_cachegen.bench.stream.check_kernel_links", check)
    arguments = [word.format(**places) for word in (*STREAM.split(), "{table}")]
    assert "no netem" in refuse(*arguments, "--shaper", "tc", "--latency-ms", 1)


def test_a_table_is_read_once_for_all_documents(
    run, tiny_model_folder, document, table, tmp_path, monkeypatch
):
    documents = [tmp_path / f"{name}.txt" for name in "abc"]
    for count, path in enumerate(documents):
        path.write_text(document.read_text()[100 * count :])
    loads: list[Path] = []
    read = TableRecord.read.__func__  # with which every load begins

    def counting(cls, store, *args, **options):
        loads.append(Path(store.location))
        return read(cls, store, *args, **options)

    monkeypatch.setattr(TableRecord, "read", classmethod(counting))
    encode = ("encode", tiny_model_folder, "--tables", table, "--text", *documents)
    for _ in range(2):
        run(*encode, "--into", tmp_path / "caches")
        assert loads == [table]
        loads.clear()
