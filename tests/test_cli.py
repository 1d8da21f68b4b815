"""The command lines: quick help, clear errors, bytes in and out, runs that can be stopped."""

import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimodel.__main__ import RECIPES, main
from minimodel.engine.generate import generate_with_cache, generate_without_cache
from minimodel.model import checkpoint, train
from minimodel.tokenizer import decode_bytes, encode

COMMAND = [sys.executable, "-m", "minimodel"]


LATENT = {"num_kv_heads": 6, "latent_size": 28, "nope_dim": 10, "rope_dim": 8}
SHARED = {"kv_source_layers": (0, 0, 2, 0)}


@pytest.fixture(scope="module")
def model_folder(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save(make_model(dtype=torch.float32, vocab_size=264), folder)
    return folder


@pytest.fixture
def generate(model_folder, tmp_path, capsysbinary):
    """Runs `generate` on a prompt; gives exit code, standard output and standard error."""
    def run(prompt: bytes, *options):
        (tmp_path / "prompt").write_bytes(prompt)
        code = main(["generate", "--prompt-file", str(tmp_path / "prompt"),
                     "--model", str(model_folder), *options])
        out, err = capsysbinary.readouterr()
        return code, out, err.decode()
    return run


# --- help ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["train", "--help"],
                                       ["serve", "--help"], ["store", "--help"]])
def test_help_comes_without_torch(arguments):
    code = ("import sys, runpy; sys.argv = ['minimodel', *sys.argv[1:]]\n"
            "try: runpy.run_module('minimodel', run_name='__main__')\n"
            "except SystemExit as end: assert not end.code, end.code\n"
            "assert 'torch' not in sys.modules, 'torch was imported'")
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m minimodel")


def test_help_comes_at_once():
    """In the processor's seconds, which do not count those that others make it wait."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "the following arguments are required: COMMAND"),
    (["bake"], "invalid choice: 'bake'"),
    (["generate"], "the following arguments are required: --prompt-file"),
    (["generate", "--prompt-file", "p", "--max-tokens", "many"], "invalid int value: 'many'"),
    (["train", "--fast"], "unrecognized arguments: --fast"),
    (["train", "--recipe", "huge"], "invalid choice: 'huge'"),
    (["train", "--small", "--recipe", "latent"], "--recipe: not allowed with argument --small")])
def test_an_unknown_option_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_waiting_threads_sleep_unless_the_user_says_otherwise():
    code = "import os, minimodel.__main__; print(os.environ['OMP_WAIT_POLICY'])"
    for given, expected in [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]:
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        done = subprocess.run([sys.executable, "-c", code], env=env | given, text=True,
                              capture_output=True, check=True)
        assert done.stdout.strip() == expected


# --- generate ------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [b"Q: Who?\n", b"\xff\xfe caf\xe9 \x00", b"line\r\nline\r\n"],
                         ids=["text", "no UTF-8", "Windows line ends"])
@pytest.mark.parametrize("options", [[], ["--without-cache"]], ids=["cache", "no cache"])
def test_the_answer_continues_the_very_bytes_of_the_file(generate, model_folder, prompt, options):
    expected = generate_with_cache(checkpoint.load(model_folder), encode(prompt), 11)
    assert generate(prompt, "--max-tokens", "11", *options) == (
        0, decode_bytes(expected) + b"\n", "")


@pytest.mark.parametrize("changes", [LATENT, SHARED, SHARED | LATENT], ids=str)
def test_any_checkpoint_folder_generates(generate, make_model, tmp_path, changes):
    checkpoint.save(make_model(dtype=torch.float32, vocab_size=264, **changes), tmp_path / "other")
    model = checkpoint.load(tmp_path / "other")
    expected = generate_without_cache(model, encode(b"Q: Who?\n"), 11)
    assert generate(b"Q: Who?\n", "--max-tokens", "11", "--model", str(tmp_path / "other")) == (
        0, decode_bytes(expected) + b"\n", "")


@pytest.mark.parametrize("vocab_size", [251, 271])
def test_a_model_of_another_vocabulary_is_refused(generate, make_model, tmp_path, vocab_size):
    checkpoint.save(make_model(dtype=torch.float32, vocab_size=vocab_size), tmp_path / "other")
    code, out, err = generate(b"x", "--model", str(tmp_path / "other"))
    assert (code, out) == (2, b"")
    assert f"other has a vocabulary of {vocab_size}, not the 264 bytes and marks" in err


def test_standard_input_is_a_prompt_too(model_folder):
    done = subprocess.run([*COMMAND, "generate", "--prompt-file", "-", "--max-tokens", "5",
                           "--model", model_folder], input=b"Hello\xff", capture_output=True)
    expected = generate_with_cache(checkpoint.load(model_folder), encode(b"Hello\xff"), 5)
    assert (done.returncode, done.stdout, done.stderr) == (0, decode_bytes(expected) + b"\n", b"")


@pytest.mark.parametrize(("prompt", "options", "message"), [
    (b"", [], "the prompt file .*prompt is empty: write at least one byte into it"),
    (b"x" * 90, ["--max-tokens", "20"],
     "a prompt of 91 tokens and up to 20 new ones need 111 positions, over the model's context of "
     "97: shorten the prompt or lower max_tokens"),
    (b"x", ["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
    (b"x", ["--max-tokens", "-4"], "max_tokens=-4 must be at least 1"),
    (b"x", ["--model", "nowhere"], "no config.json in nowhere: give the folder of a checkpoint")])
def test_a_request_that_cannot_be_served(generate, prompt, options, message):
    code, out, err = generate(prompt, *options)
    assert (code, out) == (2, b"")
    assert re.fullmatch(f"error: {message}.*\n", err)


@pytest.mark.parametrize("name", ["nowhere.txt", "."])
def test_a_prompt_file_that_cannot_be_read(name, capsys):
    assert main(["generate", "--prompt-file", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: cannot read the prompt file {name}: ")
    assert "Give a file, or - for standard input" in err


def test_a_reader_that_leaves_early_is_no_error(model_folder, tmp_path):
    (tmp_path / "prompt").write_bytes(b"x")
    writer = subprocess.Popen([*COMMAND, "generate", "--prompt-file", tmp_path / "prompt",
                               "--max-tokens", "90", "--model", model_folder],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait(60) == 1
    writer.stderr.close()


# --- train ---------------------------------------------------------------------------------


@pytest.fixture
def train_briefly(monkeypatch, tmp_path, capsys):
    """`train`, with three short steps in place of every recipe's; the small one by default."""
    for name in RECIPES:
        recipe = getattr(train, name.upper())
        monkeypatch.setattr(train, name.upper(), replace(recipe, stages=(train.Stage(64, 3, 64),)))

    def run(*options, which=("--small",)):
        code = main(["train", *which, "--threads", "1", "--float32", *options])
        out, err = capsys.readouterr()
        return code, out, err
    return run


def test_a_finished_run_names_its_checkpoint_and_the_command_to_try(train_briefly, tmp_path):
    code, out, _ = train_briefly("--out", str(tmp_path / "run"))
    assert code == 0
    assert re.search(r"step +3 of 3 +rows of +64 +loss \d\.\d{3} +recall", out)
    assert f"generate --model {tmp_path / 'run' / 'checkpoint'} --prompt-file" in out
    assert checkpoint.load(tmp_path / "run" / "checkpoint").config == train.SMALL.config


@pytest.mark.parametrize(("which", "folder", "config"), [
    ([], "run-toy", train.SHIPPED.config),
    (["--recipe", "small"], "run-small", train.SMALL.config),
    (["--recipe", "latent"], "run-latent", train.LATENT.config),
    (["--recipe", "shared"], "run-shared", train.SHARED.config)], ids=str)
def test_each_recipe_trains_its_own_design_into_its_own_folder(
        train_briefly, tmp_path, monkeypatch, which, folder, config):
    monkeypatch.chdir(tmp_path)
    assert train_briefly(which=which)[0] == 0
    assert checkpoint.load(tmp_path / folder / "checkpoint").config == config


def test_a_run_of_another_recipe_in_the_same_folder_is_refused(train_briefly, tmp_path):
    assert train_briefly("--out", str(tmp_path / "run"))[0] == 0
    code, _, err = train_briefly("--out", str(tmp_path / "run"), which=("--recipe", "latent"))
    assert code == 2
    assert "another recipe (config" in err


@pytest.mark.parametrize(("options", "message"), [
    (["--threads", "0"], "--threads 0 must be at least 1"),
    (["--out", "{file}"], "cannot make the folder .*file: .* Give a folder that you may write to"),
    (["--out", "{file}/below"], "cannot make the folder .*below: .* Give a folder")])
def test_a_run_that_cannot_start(train_briefly, tmp_path, options, message):
    (tmp_path / "file").write_text("in the way")
    code, _, err = train_briefly(*(option.format(file=tmp_path / "file") for option in options))
    assert code == 2
    assert re.search(f"error: {message}", err)


def test_another_seed_in_the_same_folder_is_refused(train_briefly, tmp_path):
    assert train_briefly("--out", str(tmp_path / "run"))[0] == 0
    code, _, err = train_briefly("--out", str(tmp_path / "run"), "--seed", "9")
    assert code == 2
    assert "another recipe (seed differs): give another folder" in err


def interrupted(folder):
    """Start the small recipe, press Ctrl-C a while after its first sign of life."""
    (folder / "log.jsonl").unlink(missing_ok=True)
    child = subprocess.Popen([*COMMAND, "train", "--small", "--float32", "--threads", "1",
                              "--out", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    deadline = time.monotonic() + 90
    while not (folder / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)         # it is in its first steps by now
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=90)
    assert child.returncode == 0, err
    assert f"Stopped and saved in {folder}. The same command goes on from there." in out
    return train.read_state(folder / "resume.pt")["num_done"]


def test_ctrl_c_saves_the_run_and_the_same_command_goes_on(tmp_path):
    first = interrupted(tmp_path)
    assert 1 <= first < 100
    assert interrupted(tmp_path) > first


# --- benchmarks/recall.py ------------------------------------------------------------------


@pytest.fixture
def recall(capsys):
    """Runs the benchmark; gives exit code, standard output and standard error."""
    path = Path(__file__).parents[1] / "benchmarks" / "recall.py"
    script = runpy.run_path(str(path))

    def run(folder, *options):
        code = script["main"](["--model", str(folder), "--count", "1", *options])
        return code, *capsys.readouterr()
    return run


@pytest.mark.parametrize(("changes", "note_bytes"), [
    ({}, 4 * 4 * 2 * 2 * 14), (LATENT, 4 * 4 * (28 + 8)), (SHARED, 4 * 2 * 2 * 2 * 14)], ids=str)
def test_recall_is_measured_of_any_checkpoint_folder(
        recall, make_model, tmp_path, changes, note_bytes):
    checkpoint.save(make_model(dtype=torch.float32, vocab_size=264, context=4096, **changes),
                    tmp_path / "other")
    code, out, err = recall(tmp_path / "other", "--json", "--kinds", "dense", "zeroed")
    assert (code, err) == (0, "")
    line = json.loads(out)
    assert (line["model"], line["note_bytes_per_token"]) == ("other", note_bytes)
    counted = [(row["kind"], row["asked"], row["right"]) for row in line["results"]]
    assert counted == [("dense", 1, 0), ("zeroed", 1, 0)]


@pytest.mark.parametrize(("folder", "message"), [
    ("nowhere", "no config.json in nowhere: give the folder"),
    ("short", "is beyond the model's context of 97 tokens")])
def test_a_model_whose_recall_cannot_be_measured(
        recall, model_folder, tmp_path, folder, message):
    code, out, err = recall(model_folder if folder == "short" else folder, "--kinds", "dense")
    assert (code, out) == (2, "")
    assert message in err


# --- store ---------------------------------------------------------------------------------


STATS = re.compile(r"(\d+) records, ([\d,]+) bytes, models: (\d+)\n")


@pytest.fixture
def store(tmp_path, capsysbinary):
    """Runs a `store` command on the folder `notes`; gives exit code, output and errors."""
    def run(action, folder=tmp_path / "notes"):
        code = main(["store", action, str(folder)])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()
    return run


def hits(err: str) -> tuple[int, int, int]:
    return tuple(int(re.search(rf"\b{name}=(\d+)", err)[1])
                 for name in ("hit_tokens", "miss_tokens", "disk_hit_tokens"))


def test_the_second_time_only_the_end_of_a_prompt_is_computed(generate, store, tmp_path):
    options = ["--max-tokens", "5", "--store", str(tmp_path / "notes"), "--usage"]
    prompt = b"a prompt of forty-eight bytes, and so of 3 block"
    plain = generate(prompt, "--max-tokens", "5")
    assert plain[0] == 0
    first, second = generate(prompt, *options), generate(prompt, *options)
    assert first[:2] == second[:2] == plain[:2]
    assert hits(first[2]) == (0, 49, 0)                 # the start token makes 49
    assert hits(second[2]) == (48, 1, 48)
    code, out, err = store("stats")
    assert (code, err) == (0, "")
    records, num_bytes, models = STATS.match(out).groups()
    assert (records, models) == ("3", "1")
    size = sum(path.stat().st_size for path in (tmp_path / "notes").glob("*/*.kv"))
    assert num_bytes == f"{size:,}"


def test_records_can_be_listed_checked_and_cleared(generate, store, tmp_path):
    generate(b"x" * 40, "--max-tokens", "1", "--store", str(tmp_path / "notes"))
    names = {path.stem[:12] for path in (tmp_path / "notes").glob("*/*.kv")}
    code, out, _ = store("ls")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} == names
    assert len(names) == 2
    assert all("of 168 h" in line for line in out.splitlines())
    assert store("check") == (0, "2 records, all whole\n", "")
    assert store("expire") == (0, "0 records removed\n", "")
    assert store("clear") == (0, "2 records removed\n", "")
    assert STATS.match(store("stats")[1])[1] == "0"


def test_a_damaged_record_is_named_and_old_ones_expire(generate, store, tmp_path):
    generate(b"x" * 40, "--max-tokens", "1", "--store", str(tmp_path / "notes"))
    damaged, old = sorted((tmp_path / "notes").glob("*/*.kv"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    code, out, err = store("check")
    assert (code, out) == (2, "")
    assert damaged.name in err
    assert "checksum" in err
    week_ago = time.time() - 8 * 24 * 3600
    os.utime(old, (week_ago, week_ago))
    assert store("expire")[:2] == (0, "1 records removed\n")
    assert not old.exists()


def test_a_store_that_is_not_there(store, tmp_path):
    code, out, err = store("ls", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert f"there is no folder {tmp_path / 'nowhere'}: give the one that --store names" in err
    assert not (tmp_path / "nowhere").exists()


def test_a_store_and_no_cache_contradict_each_other(generate):
    code, _, err = generate(b"x", "--without-cache", "--store", "notes")
    assert code == 2
    assert "leave out either" in err
