"""A document's way: encode, info, verify, generate, fetch over HTTP, push to a Hub and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_cachegen import ModelTable, profile_model, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.bench.link import LinkServer, Reset
from hf_cachegen.cli import app
from hf_cachegen.hf import codecs
from hf_cachegen.hf.table_hub import push_table
from hf_cachegen.stores import LocalStore

QUESTION = "\nWho signed it?"


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of an artefact, without the lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_info_as_json(run, encoded, tiny_model_folder):
    facts = json.loads(run("info", encoded, "--json"))
    assert facts["kind"] == "cache"
    assert facts["model"] == tiny_model_folder.name
    assert facts["dtype"] == "float32"
    assert facts["chunks"] == -(-facts["tokens"] // 200)
    assert facts["raw_bytes"] == facts["tokens"] * 3 * 2 * 2 * 16 * 4
    levels = facts["levels"]
    assert [level["name"] for level in levels][-1] == "lossless"
    for level in levels:
        assert level["size_bytes"] * level["ratio"] == pytest.approx(facts["raw_bytes"])
        assert level["bits_per_value"] * level["ratio"] == pytest.approx(32)
    sizes = [level["size_bytes"] for level in levels]
    assert sizes == sorted(sizes)
    assert sum(sizes) < facts["size_bytes"]
    assert facts["table"]["location"] == "embedded"


def test_info_for_people(run, encoded):
    text = run("info", encoded)
    assert "LlamaForCausalLM" in text
    assert "bit-exact" in text


def test_info_of_the_installation(run):
    facts = json.loads(run("info", "--json"))
    assert facts["entropy_backends"]["numpy"] is None
    assert "CUDA" in facts["entropy_backends"]["triton"]
    assert "usable" in run("info")


def test_levels_and_tables_of_encode(run, refuse, tmp_path, tiny_model_folder, document):
    arguments = ["encode", tiny_model_folder, "--text", document, "-o", tmp_path / "kv"]
    run(*arguments, "--tables", "none", "--levels", "lossless,raw")
    facts = json.loads(run("info", tmp_path / "kv", "--json"))
    assert [level["name"] for level in facts["levels"]] == ["lossless", "raw"]
    assert facts["table"] is None
    assert "--overwrite" in refuse(*arguments)
    run(*arguments, "--overwrite")
    assert len(json.loads(run("info", tmp_path / "kv", "--json"))["levels"]) == 5
    assert "delta-9" in refuse(*arguments, "--levels", "delta-9")


def test_verify_finds_one_wrong_byte(run, refuse, encoded, tmp_path):
    assert "intact" in run("verify", encoded)
    damaged = tmp_path / "damaged"
    shutil.copytree(encoded, damaged)
    for pattern in ("chunks/*.kv", "table/*/*.safetensors"):
        file = next(damaged.glob(pattern))
        intact = file.read_bytes()
        file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        assert file.name in refuse("verify", damaged)
        file.write_bytes(intact)
    assert "intact" in run("verify", damaged)


def test_generate_from_the_exact_cache_says_what_the_text_says(encoded, tiny_model_folder):
    result = CliRunner().invoke(
        app,
        [
            *("generate", str(tiny_model_folder), str(encoded), "--question", QUESTION),
            *("--level", "finest", "--max-new-tokens", "8", "--compare", "--verbose"),
        ],
    )
    assert result.exit_code == 0, result.stderr
    assert "the same answer" in result.stderr
    assert result.stderr.count("first token after") == 2
    assert "lossless" in result.stderr
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:] != ""


def test_generate_refuses_what_cannot_be(run, refuse, encoded, tiny_model_folder):
    arguments = ["generate", tiny_model_folder, encoded, "--question", QUESTION]
    assert "lossless" in refuse(*arguments, "--level", "delta-9")
    assert "both" in refuse(*arguments, "--level", "raw", "--ttft-target", 1)
    assert "float32" in refuse(*arguments, "--dtype", "bfloat16")


def test_fetch_over_http_resumes_and_is_the_same(run, encoded, tmp_path):
    out = tmp_path / "copy"
    with LinkServer(encoded, faults=[Reset(3, 2000)]) as server:
        assert run("fetch", server.url, "-o", out).splitlines()[-1] == str(out)
        assert files_of(out) == files_of(encoded)
        chunk = next(out.glob("chunks/*.kv"))
        chunk.unlink()
        server.requests.clear()
        run("fetch", server.url, "-o", out)
        assert files_of(out) == files_of(encoded)
        requested = {record.path for record in server.requests if record.path.endswith(".kv")}
        assert requested == {f"chunks/{chunk.name}"}


def test_fetch_replaces_an_older_version_but_no_other_cache(
    run, refuse, encoded, tmp_path, tiny_model_folder, document
):
    text = document.read_text()
    shorter, out = tmp_path / "shorter.txt", tmp_path / "copy"
    shorter.write_text(text[: len(text) // 2])
    encode = ("encode", tiny_model_folder, "--tables", "none", "--chunk-tokens", 200)
    run(*encode, "--text", shorter, "-o", tmp_path / "short")
    run(*encode, "--text", document, "-o", tmp_path / "long")
    run("fetch", tmp_path / "short", "-o", out)
    run("fetch", tmp_path / "long", "-o", out)
    assert files_of(out) == files_of(tmp_path / "long")
    for other in (encoded, tmp_path / "short"):
        assert "--overwrite" in refuse("fetch", other, "-o", out)
    assert files_of(out) == files_of(tmp_path / "long")
    run("fetch", encoded, "-o", out, "--overwrite")
    assert files_of(out) == files_of(encoded)


def test_a_damaged_source_leaves_the_folder_as_it_was(refuse, encoded, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(encoded, source)
    chunk = sorted(source.glob("chunks/*.kv"))[-1]
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert chunk.name in refuse("fetch", source, "-o", out)
    assert not (out / "cache.json").exists()
    assert not (out / "chunks" / chunk.name).exists()
    assert list(out.rglob("*.tmp")) == []


def test_fetch_of_a_url_needs_a_folder(refuse, encoded):
    with LinkServer(encoded) as server:
        assert "-o FOLDER" in refuse("fetch", server.url)


def test_push_and_use_from_the_hub(run, refuse, hub, encoded, tmp_path, tiny_model_folder):
    folder = tmp_path / "push"
    shutil.copytree(encoded, folder)
    at = ("--endpoint", hub.endpoint, "--token", hub.token)
    url = run("push", folder, "me/contract-kv", "--private", "--message", "First", *at)
    assert "me/contract-kv" in url
    assert "no repository" in refuse("info", "me/contract-kv", "--endpoint", hub.endpoint)
    assert json.loads(run("info", "me/contract-kv", "--json", *at))["kind"] == "cache"
    assert "intact" in run("verify", "me/contract-kv", *at)
    run("generate", tiny_model_folder, "me/contract-kv", "--question", QUESTION, *at)
    fetched = Path(run("fetch", "me/contract-kv", *at).splitlines()[-1])
    with LocalStore(fetched) as store, LocalStore(encoded) as original:
        assert Artifact.open(store).manifest == Artifact.open(original).manifest
    assert "cannot push" in refuse("push", folder, "me/x", "--endpoint", "http://127.0.0.1:9")
    assert "cache.json" in refuse("push", tmp_path, "me/x", *at)


def test_a_table_is_pushed_with_its_card_and_used_by_encode(
    run, hub, tmp_path, tiny_model_folder, document
):
    table = tmp_path / "table"
    profile = ("profile", tiny_model_folder, "--text", document, "--max-samples", 2)
    profile += ("--sample-tokens", 100)
    run(
        *profile,
        "-o",
        table,
        "--model-id",
        "me/tiny",
        "--codecs",
        "delta",
        "--set",
        "delta.group=5",
        "--set",
        "delta.factors=2,1",
    )
    at = ("--endpoint", hub.endpoint, "--token", hub.token)
    run("push", table, "me/tiny-table", *at)
    facts = json.loads(run("info", "me/tiny-table", "--json", *at))
    assert facts["kind"] == "table"
    assert facts["codecs"]["delta"]["params"]["group"] == 5
    shown = run("info", "me/tiny-table", *at)
    assert "[2.0, 1.0]" in shown
    assert facts["codecs"]["delta"]["digest"] in shown
    assert "intact" in run("verify", "me/tiny-table", *at)
    run("fetch", "me/tiny-table", "-o", tmp_path / "copy", *at)
    encode = ("encode", tiny_model_folder, "--text", document, "-o", tmp_path / "kv")
    run(*encode, "--tables", tmp_path / "copy")
    cache = json.loads(run("info", tmp_path / "kv", "--json"))
    assert [level["name"] for level in cache["levels"]] == ["delta-0", "delta-1", "lossless"]
    assert cache["table"]["codecs"] == {"delta": facts["codecs"]["delta"]["digest"]}


def test_levels_of_transform_from_profile_to_answer(
    run, refuse, tmp_path, tiny_model_folder, document
):
    table, kv = tmp_path / "table", tmp_path / "kv"
    profile = ("profile", tiny_model_folder, "--text", document, "--sample-tokens", 200)
    parameters = ("--set", "transform.group=2", "transform.levels=2", "transform.step=3e-4")
    run(*profile, "-o", table, "--codecs", "transform", *parameters)
    facts = json.loads(run("info", table, "--json"))
    assert {facts["codecs"]["transform"]["params"][name] for name in ("group", "levels")} == {2}
    encode = ("encode", tiny_model_folder, "--text", document, "--tables", table)
    run(*encode, "-o", kv, "--importance", "recent")
    names = [level["name"] for level in json.loads(run("info", kv, "--json"))["levels"]]
    assert names == ["transform-0", "transform-1", "lossless"]
    assert "overwrite" in refuse(*encode, "-o", kv, "--importance", "flat")
    assert "intact" in run("verify", kv)
    answer = ("generate", tiny_model_folder, kv, "--question", QUESTION, "--max-new-tokens", 4)
    for level in names:
        assert run(*answer, "--level", level)


def test_fetch_brings_what_a_cache_uses_of_a_table_on_the_hub(
    run, hub, monkeypatch, tmp_path, tiny_model, tiny_tokenizer, tiny_text, random_transform_tables
):
    delta = profile_model(tiny_model, tiny_tokenizer, {"a": tiny_text}, sample_tokens=200)
    both = ModelTable.build(
        *(delta.tables["delta"], random_transform_tables(delta.record.layout)),
        **{name: getattr(delta.record, name) for name in ("model_id", "config", "layout", "data")},
    )
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(both.save(tmp_path / "table"), "me/table", **options)
    levels = ["delta-1", "lossless"]
    context = (tiny_model, tiny_tokenizer, tiny_text, tmp_path / "kv")
    save_cache(*context, tables="me/table", levels=levels, **options)
    monkeypatch.setattr(codecs, "HF_HOME", str(tmp_path / "hf-home"))
    at = ("--endpoint", hub.endpoint, "--token", hub.token)
    run("fetch", tmp_path / "kv", "-o", tmp_path / "copy", *at)
    kept = {path.name for path in (tmp_path / "hf-home").rglob("*.*") if path.is_file()}
    assert kept == {"table.json", "delta.safetensors"}
    assert "transform" in json.loads(run("info", "me/table", "--json", *at))["codecs"]


def test_push_makes_the_branch_it_is_to_go_to(run, hub, encoded, tmp_path, tiny_model_folder):
    folder, at = tmp_path / "push", ("--endpoint", hub.endpoint, "--token", hub.token)
    shutil.copytree(encoded, folder)
    push = ("push", folder, "me/branches", *at)
    run(*push, "--revision", "draft")
    assert json.loads(run("info", "me/branches@draft", "--json", *at))["kind"] == "cache"
    main = CliRunner().invoke(app, ["info", "me/branches", *map(str, at)])
    assert main.exit_code == 2
    run(*push)
    text = tmp_path / "other.txt"
    text.write_text("Something else.")
    encode = ("encode", tiny_model_folder, "--tables", "none", "--text", text, "-o", folder)
    run(*encode, "--overwrite")
    run(*push, "--revision", "draft")
    before, after = (
        json.loads(run("info", f"me/branches@{branch}", "--json", *at))
        for branch in ("main", "draft")
    )
    assert before["table"] is not None
    assert after["table"] is None
    assert "intact" in run("verify", "me/branches", *at)
    assert "intact" in run("verify", "me/branches@draft", *at)
