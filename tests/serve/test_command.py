"""The command line: a server in a process of its own, from its first word to its last."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import openai
import pytest
import torch

from minimodel.__main__ import main
from minimodel.model import checkpoint
from minimodel.serve.server import bind

pytestmark = pytest.mark.timeout(300)
COMMAND = [sys.executable, "-m", "minimodel", "serve"]


@pytest.fixture(scope="module")
def folder(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint.save(make_model(dtype=torch.float32, vocab_size=264, context=300), folder)
    return folder


@contextmanager
def server(*options, end=signal.SIGTERM):
    """The server's process and its URL; it ends by a signal."""
    process = subprocess.Popen([*COMMAND, "--port", "0", *map(str, options)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"(\S+) at (http://\S+)/v1 \(Ctrl-C ends it\)\n", line)
        assert found, (line, process.stderr.read())
        yield process, *found.groups()
        process.send_signal(end)
        process.wait(200)
    finally:
        process.kill()
        process.communicate()


def ask(url, name, key="none"):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=200)
    return client.completions.create(model=name, prompt="x" * 40, max_tokens=3).usage


def test_what_one_process_noted_the_next_one_finds(folder, tmp_path):
    options = ("--model", folder, "--store", tmp_path / "store", "--replicas", 2)
    with server(*options) as (process, name, url):
        assert name == "tiny"
        assert ask(url, name).prompt_cache_hit_tokens == 0
        assert ask(url, name).prompt_cache_hit_tokens == 32
    assert process.returncode == -signal.SIGTERM        # as a process ends that was asked to
    with server(*options, end=signal.SIGINT) as (process, name, url):
        used = ask(url, name)
        assert (used.prompt_cache_hit_tokens, used.prompt_cache_disk_hit_tokens) == (32, 32)
    assert process.returncode == 130
    assert main(["store", "check", str(tmp_path / "store")]) == 0


def test_keys_and_a_name_and_limits(folder, tmp_path):
    (tmp_path / "keys").write_text("sk-1 ann\n")
    with server("--model", folder, "--name", "small", "--api-key-file", tmp_path / "keys",
                "--max-body-bytes", 50) as (_, name, url):
        assert name == "small"
        with pytest.raises(openai.AuthenticationError):
            ask(url, name)
        with pytest.raises(openai.APIStatusError, match="over the limit of 50"):
            ask(url, name, "sk-1")


def test_an_address_that_others_reach_is_warned_of(folder, tmp_path):
    (tmp_path / "keys").write_text("sk-1 ann\n")
    for options, words in (((), "warning: whoever reaches this address may use it: give "
                                "--api-key-file\n"), (("--api-key-file", tmp_path / "keys"), "")):
        process = subprocess.Popen([*COMMAND, "--port", "0", "--host", "0.0.0.0", "--model",
                                    str(folder), *map(str, options)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert " at http://0.0.0.0:" in process.stdout.readline()
        if words:
            assert process.stderr.readline() == words
        process.terminate()
        _, said = process.communicate(timeout=200)
        assert said == ""


@pytest.mark.parametrize(("options", "message"), [
    (["--replicas", "0"], "--replicas 0 must be at least 1"),
    (["--blocks", "-1"], "--blocks -1 must be at least 1"),
    (["--max-waiting", "0"], "--max-waiting 0 must be at least 1"),
    (["--max-body-bytes", "0"], "--max-body-bytes 0 must be at least 1"),
    (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
    (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen on no.such.host.invalid"),
    (["--api-key-file", "nowhere"], "cannot read the API keys in nowhere"),
    (["--port", "0", "--model", "nowhere"], "no config.json in nowhere: give the folder"),
    (["--port", "0", "--store", "{file}"], "cannot make a store in .*file")])
def test_a_server_that_cannot_start(options, message, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["serve", *(option.format(file=tmp_path / "file") for option in options)]) == 2
    assert re.search(f"^error: {message}", capsys.readouterr().err)


def test_a_port_in_use(capsys):
    with bind() as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert re.search(f"^error: cannot listen on 127.0.0.1 port {port}: .* in use.*Give another",
                     capsys.readouterr().err)


def test_without_its_libraries_it_says_which_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("minimodel.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--port", "0"]) == 2
    assert "which is not installed: pip install fastapi uvicorn" in capsys.readouterr().err
