"""benchmarks/experts.py, its quick run: the same tokens everywhere, and counts that must hold."""

import io
import json
import runpy
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from minimodel.model import checkpoint

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "experts.py"))
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def rows():
    """The lines of one quick run, by their case."""
    with redirect_stdout(io.StringIO()) as out:
        assert SCRIPT["main"](["--quick", "--json"]) == 0
    found = {}
    for line in map(json.loads, out.getvalue().splitlines()):
        assert (line["benchmark"], line["model"]) == ("experts", "toy")
        found.setdefault(line["case"], []).append(line)
    return found


def test_each_case_is_there_and_has_the_tokens_of_an_undivided_engine(rows):
    assert [row["ranks"] for row in rows["spread"]] == [1, 2]
    assert [row["text"] for row in rows["balance"]] == ["arithmetic", "mixed"]
    assert [row["store"] for row in rows["killed"]] == [False, True]
    assert all(row["same_tokens"] is True for case in rows.values() for row in case)


def test_two_ranks_read_half_each_and_send(rows):
    config, (one, two) = checkpoint.read_config(checkpoint.TOY), rows["spread"]
    layers = config.num_layers - config.num_dense_layers
    expert = 3 * config.hidden_size * config.expert_size * 4
    share = config.experts_per_token / config.num_experts
    even = layers * config.num_experts * (1 - (1 - share) ** one["requests"]) * expert
    assert one["expert_bytes_modelled"] == pytest.approx(even, abs=1)
    least, most = config.experts_per_token, config.num_experts
    assert all(least * expert <= layer <= most * expert for layer in one["expert_bytes_layers"])
    assert sum(one["expert_bytes_layers"]) == pytest.approx(one["expert_bytes"], abs=layers)
    assert 2 * two["expert_bytes"] == pytest.approx(one["expert_bytes"], rel=0.02)
    rows_back_and_forth = layers * config.experts_per_token * config.hidden_size * 4 * 2
    assert one["sent_bytes"] == one["sent_bytes_modelled"] == 0
    assert two["sent_bytes_modelled"] == rows_back_and_forth / 2
    assert 0 < two["sent_bytes"] < 1.1 * rows_back_and_forth


def test_shares_ratios_and_imbalances_are_such(rows):
    one, two = rows["spread"]
    assert one["ratio"] == 1 and two["ratio"] > 0
    assert all(0 < row["communicating_share"] < 1 for row in (one, two))
    for row in rows["balance"]:
        for way in ("in_order", "placed", "in_order_step", "placed_step"):
            assert 1 <= row[way] <= 2           # the fullest of two ranks has at most all rows
        assert 1.05 < row["random_step"] < 1.4  # 12 rows: a fair coin's 7.35 : 4.65, about


def test_a_killed_rank_loses_nothing_and_a_store_saves_its_work(rows):
    for row in rows["killed"]:
        assert row["moved"] >= 1 and row["lost"] == 0
        assert 0 < row["noticed_s"] <= row["decided_s"] <= row["rebuilt_s"]
        assert min(row["others_s"], row["moved_s"]) > row["decided_s"]
    without, kept = rows["killed"]
    assert without["computed_again"] > 200 * without["moved"]
    assert kept["computed_again"] < 32 * kept["moved"]      # blocks of 16 tokens


def test_the_tables_have_a_row_for_each_case(rows, capsys):
    for case, tables in {"spread": ("READ", "TIMED"), "balance": ("BALANCE",),
                         "killed": ("LOSS",)}.items():
        SCRIPT["report"](rows[case], Namespace(json=False), *map(SCRIPT.get, tables))
        for table, printed in zip(tables, capsys.readouterr().out.split("\n\n"), strict=False):
            lines = printed.splitlines()
            assert lines[0].split(" | ")[0] == f"| {next(iter(SCRIPT[table]))}"
            assert len(lines) == 2 + len(rows[case])
            assert {line.count("|") for line in lines} == {len(SCRIPT[table]) + 1}


@pytest.mark.parametrize(("options", "message"), [
    (["--tokens", "9"], "9 must be at least 10"),
    (["--model", "nowhere"], "no config.json in nowhere: give the folder")])
def test_options_that_cannot_be_run_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as refused:
        SCRIPT["main"](options)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
