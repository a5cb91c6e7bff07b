"""Locations that commands are given, with the options for the Hub, and Hubs that do not answer."""

from __future__ import annotations

import shutil
import socket

import huggingface_hub.constants
import pytest

from hf_cachegen.bench.link import LinkServer

COMMANDS = [
    ("info",),
    ("verify",),
    ("fetch", "-o", "{out}"),
    ("generate", "--question", "?"),
]


def arguments(command, location, out):
    """The words of a command on a location."""
    name, *rest = (word.format(out=out) for word in command)
    return (name, *(["model"] if name == "generate" else []), location, *rest)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_revision_is_ignored(run, refuse, hub, encoded, tmp_path, command):
    out = tmp_path / "out"
    with LinkServer(encoded) as server:
        for location in (encoded, server.url):
            message = refuse(*arguments(command, location, out), "--revision", "draft")
            assert "--revision draft: expected a Hub repository" in message
    at = ("--endpoint", hub.endpoint, "--token", hub.token)
    shutil.copytree(encoded, tmp_path / "push")
    run("push", tmp_path / "push", "me/kv", *at)
    named = (*arguments(command, "me/kv@main", out), *at)
    assert not out.exists()
    if command[0] != "generate":
        run(*named, "--revision", "main")
    run("push", tmp_path / "push", "me/kv", "--revision", "draft", *at)
    assert "me/kv@main names another one" in refuse(*named, "--revision", "draft")


@pytest.fixture
def closed_port():
    """A port of this machine that nobody listens to."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.mark.parametrize("kind", ["cache", "table"])
@pytest.mark.parametrize("given", ["option", "setting"])
def test_push_to_a_hub_that_is_not_there(
    refuse, encoded, tmp_path, closed_port, monkeypatch, kind, given
):
    hub = f"http://127.0.0.1:{closed_port}"
    folder = tmp_path / "push"
    shutil.copytree(encoded if kind == "cache" else next((encoded / "table").iterdir()), folder)
    push = ("push", folder, "me/kv", "--token", "t")
    if given == "option":
        message = refuse(*push, "--endpoint", hub)
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub)
        message = refuse(*push)
    assert hub in message
    assert "cannot push to me/kv" in message
    assert "run the same command again" in message
