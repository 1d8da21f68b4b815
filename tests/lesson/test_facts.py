"""Facts are printed with their standing: agreed, reported, computed or disputed."""

import pytest

from minimodel.lesson import facts
from minimodel.lesson.facts import Fact, UnknownFactError, fact, load


def test_the_register_is_whole():
    register = load()
    assert len(register) > 250
    assert all(claim.id == id for id, claim in register.items())
    assert {claim.checked for claim in register.values()} == {"yes", "no", "conflict"}
    assert all(claim.quantity and claim.value for claim in register.values())


def test_an_agreed_fact_has_value_unit_and_citation(capsys):
    assert fact("S39") is None
    printed = capsys.readouterr().out
    assert printed.startswith("890 B/token  global cache size\n")
    assert "a public source agrees" in printed and "Why Is DeepSeek So Cheap?" in printed
    assert "[S39]" in printed


def test_what_only_one_source_says_is_reported(capsys):
    fact("S34")
    printed = capsys.readouterr().out
    assert "100,000 TB" in printed
    assert "As reported in the video, said by DeepSeek (Q&A)" in printed
    assert "no public source was found" in printed


def test_a_conflict_is_shown_as_disputed_with_the_other_side(capsys):
    fact("S02", "C1")
    printed = capsys.readouterr().out
    assert printed.count("Disputed") == 2
    assert "Public recipes run the model on 4-8 GPUs" in printed
    assert "30x V4-Pro" in printed


def test_what_was_computed_says_so(capsys):
    fact("D-06")
    assert "Computed from other facts. [D-06]" in capsys.readouterr().out


@pytest.mark.parametrize(("id", "text"), [
    ("S33", "larger batch -> slower per-user stream"), ("C18", "B200 specs")])
def test_a_claim_without_a_value_is_shown_by_its_text_alone(id, text):
    card = facts.card(load()[id])
    assert card.text.splitlines()[0] == text
    assert '<div class="ss-fact"><p>' + text.replace(">", "&gt;") + "</p>" in card.html
    assert '<span class="ss-value">' not in card.html


def test_every_fact_can_be_shown():
    for claim in load().values():
        card = facts.card(claim)
        assert claim.standing in card.text and f"[{claim.id}]" in card.text


def test_an_unknown_id_names_near_ones():
    with pytest.raises(UnknownFactError, match=r"no 's39'; did you mean S39"):
        fact("s39")
    with pytest.raises(UnknownFactError, match="ids look like"):
        fact("????????")


@pytest.mark.parametrize(("id", "amount"), [
    ("S01", "50x"), ("S34", "100,000 TB"), ("S02", "128 GPUs"), ("S47", "96 GPUs (H100)"),
    ("S11", "552 billion parameters"),
    ("S52", "155 trillion tokens a day"), ("S22", "2024-01"), ("S58", "1"),
    ("P-OI05", "4989 tokens"),
    ("P-PR03", "0.15 dollars per million tokens"), ("P-MC01", "12,031 requests"),
    ("P-SG01", "up to 6.4 throughput, 3.7 latency"), ("P-IS04", "120.96 µs"), ("S28", "-"),
    ("S18", "276 GB at 4 bit"),
])
def test_amounts_read_like_prose(id, amount):
    assert load()[id].amount == amount


def test_numbers_can_be_computed_with():
    assert load()["S39"].number == 890
    with pytest.raises(ValueError, match="fact S06 is '<4', no single number"):
        _ = load()["S06"].number


def test_markup_in_a_claim_is_escaped():
    names = dict.fromkeys(Fact.__dataclass_fields__, "<b>")
    html = facts.card(Fact(**names)).html
    assert "<b>" not in html and "&lt;b&gt;" in html


def test_a_link_is_made_only_of_an_address():
    assert '<a href="https://' in facts.card(load()["P-PR01"]).html
    assert "<a " not in facts.card(load()["S39"]).html
