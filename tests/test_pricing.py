"""Bills come out to the last digit, and lists are found by date; E14 is the book's example."""

import re
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.lesson.facts import load
from minimodel.pricing import (
    PRICE_LISTS,
    Prices,
    PricingError,
    Usage,
    advertised_ratio,
    bill,
    bill_ratio,
    effective_input_price,
    input_ratio,
    is_peak,
    price_list,
)

FLASH = price_list("deepseek-flash").prices
WARM = Usage(hit_tokens=99_000, miss_tokens=1_000, output_tokens=1_000)
COUNTS = st.integers(0, 10**9)


def at(*parts):
    return datetime(*parts, tzinfo=UTC)


# --- the worked example E14: a prompt of 100,000 tokens, 1,000 written, off-peak -----------


def test_the_worked_example():
    assert bill(WARM.all_missed(), FLASH).total == Decimal("0.0156")
    assert bill(WARM, FLASH).total == Decimal("0.001047")
    assert round(bill_ratio(WARM, FLASH), 1) == Decimal("14.9")
    assert round(input_ratio(WARM, FLASH), 1) == Decimal("33.6")
    assert input_ratio(Usage(100_000, 0, 1_000), FLASH) == advertised_ratio(FLASH) == 50


def test_a_bill_names_its_piles():
    owed = bill(Usage(3, 5, 7), Prices("11", "13", "17"))
    assert (owed.hit, owed.miss, owed.output) == (
        Decimal("0.000033"), Decimal("0.000065"), Decimal("0.000119"))
    assert owed.input == Decimal("0.000098") and owed.total == Decimal("0.000217")


def test_the_effective_price_lies_between_hit_and_miss():
    assert effective_input_price(WARM, FLASH) == Decimal("0.00447")
    assert effective_input_price(Usage(7, 0, 0), FLASH) == FLASH.hit
    assert effective_input_price(Usage(0, 7, 0), FLASH) == FLASH.miss


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_bills_add_up_exactly(hits, misses, outputs, more):
    """Two requests cost what one with their sums costs: no rounding anywhere."""
    one, other = Usage(hits, misses, outputs), Usage(more, hits, misses)
    both = Usage(hits + more, misses + hits, outputs + misses)
    assert bill(one, FLASH).total + bill(other, FLASH).total == bill(both, FLASH).total


# --- the table of lists --------------------------------------------------------------------


@pytest.mark.parametrize(("model", "when", "ratio"), [
    ("deepseek-chat", date(2024, 8, 2), "10"),
    ("deepseek-chat", date(2025, 3, 1), "3.9"),
    ("deepseek-reasoner", date(2025, 2, 28), "3.9"),
    ("deepseek-v4-flash", date(2026, 7, 1), "50"),
    ("deepseek-v4-pro", date(2026, 7, 1), "120"),
    ("deepseek-v4-flash", date(2026, 9, 1), "31.4"),
    ("deepseek-flash", date(2026, 11, 30), "50"),
    ("deepseek-v4-pro", date(2026, 11, 30), "30"),
])
def test_the_ratio_depends_on_the_date(model, when, ratio):
    expected = Decimal(ratio)
    found = advertised_ratio(price_list(model, when).prices)
    assert round(found, -expected.as_tuple().exponent) == expected


@pytest.mark.parametrize("one", PRICE_LISTS, ids=lambda one: f"{one.model} {one.period()}")
def test_prices_are_those_of_the_register(one):
    """Each list's sources exist and, in their order, state its prices."""
    stated = [Decimal(number) for id in one.sources
              for number in re.findall(r"[\d.]+", load()[id].value)]
    prices = (one.prices.hit, one.prices.miss, one.prices.output)
    assert stated == [price for price in prices if price is not None]


def test_lists_of_a_model_do_not_overlap():
    for model in {one.model for one in PRICE_LISTS}:
        lists = sorted((one for one in PRICE_LISTS if one.model == model),
                       key=lambda one: one.valid_from)
        assert all(one.valid_from < one.valid_to <= later.valid_from
                   for one, later in pairwise(lists))


def test_a_list_ends_where_the_next_begins():
    change = at(2026, 8, 16, 16)
    before = price_list("deepseek-v4-flash", change - timedelta(seconds=1))
    assert before.prices.miss == Decimal("0.14")
    assert price_list("deepseek-v4-flash", change).prices.miss == Decimal("0.22")


def test_peak_prices_are_those_of_the_register():
    monday_morning = at(2026, 11, 30, 7, 30)
    peak = price_list("deepseek-flash").prices_at(monday_morning)
    stated = [load()[id].number for id in ("P-PR02", "P-PR04", "P-PR06")]
    assert [float(peak.hit), float(peak.miss), float(peak.output)] == stated
    assert price_list("deepseek-flash").prices_at(date(2026, 11, 30)) == FLASH     # noon


def test_a_list_without_peak_hours_costs_the_same_all_day():
    old = price_list("deepseek-reasoner", date(2025, 2, 28))
    assert old.prices_at(at(2025, 2, 28, 7)) == old.prices


@pytest.mark.parametrize(("moment", "expected"), [
    (at(2026, 11, 30, 0, 59, 59), False), (at(2026, 11, 30, 1), True),
    (at(2026, 11, 30, 3, 59), True), (at(2026, 11, 30, 4), False),
    (at(2026, 11, 30, 5, 59), False), (at(2026, 11, 30, 6), True),
    (at(2026, 11, 30, 10), False), (at(2026, 11, 28, 7), False), (at(2026, 11, 29, 7), False),
    # Beijing's clock is eight hours ahead: Monday 09:00 there is Monday 01:00 UTC
    (datetime(2026, 11, 30, 9, tzinfo=timezone(timedelta(hours=8))), True),
])
def test_peak_hours(moment, expected):
    assert is_peak(moment) is expected


def test_a_fifth_of_the_week_is_peak():
    hours = [at(2026, 11, 23) + timedelta(hours=hour) for hour in range(168)]
    assert sum(map(is_peak, hours)) == 35


# --- what the API reports, and what no bill can be made of ---------------------------------


def test_usage_is_read_from_a_response():
    usage = {"prompt_tokens": 12, "prompt_cache_hit_tokens": 5, "prompt_cache_miss_tokens": 7,
             "completion_tokens": 3, "total_tokens": 15}
    assert Usage.from_api(usage) == Usage(5, 7, 3)
    with pytest.raises(PricingError, match=r"lacks prompt_cache_hit_tokens, prompt_cache_miss"):
        Usage.from_api({"completion_tokens": 3})


@pytest.mark.parametrize("counts", [(-1, 0, 0), (0, -5, 0), (0, 0, -2), (1.5, 0, 0),
                                    (True, 0, 0), ("3", 0, 0)])
def test_counts_are_whole_and_not_negative(counts):
    with pytest.raises(PricingError, match="must be a whole number of tokens, at least 0"):
        Usage(*counts)


@pytest.mark.parametrize(("price", "complaint"), [
    (0.15, "0.15 is not exact"), (True, "not exact"), ("cheap", "no number"), ("-1", "no price"),
    ("nan", "no price"), ("Infinity", "no price"), (None, "no number")])
def test_prices_are_exact_and_not_negative(price, complaint):
    with pytest.raises(PricingError, match=complaint):
        Prices(price, "1")


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(PricingError, match=r"'gpt'; the known models are deepseek-chat, deep"):
        price_list("gpt")


@pytest.mark.parametrize(("model", "when", "why"), [
    ("deepseek-flash", date(2026, 9, 9), "its first list is later"),
    ("deepseek-v4-flash", date(2026, 11, 1), "no list covers that"),
])
def test_a_date_without_a_list_names_the_dates_that_have_one(model, when, why):
    with pytest.raises(PricingError, match=rf"{why}\. Choose a date in one of these: from 2026"):
        price_list(model, when)


def test_moments_need_a_time_zone():
    with pytest.raises(PricingError, match=r"no time zone: add tzinfo=datetime\.UTC"):
        price_list("deepseek-flash", datetime(2026, 11, 30, 7))
    with pytest.raises(PricingError, match="must be a date"):
        price_list("deepseek-flash", "today")


def test_a_list_refuses_a_moment_outside_it():
    with pytest.raises(PricingError, match=r"does not hold on 2026-01-05: it runs from 2026-09"):
        price_list("deepseek-flash").prices_at(date(2026, 1, 5))


def test_output_needs_an_output_price():
    first = price_list("deepseek-chat", date(2024, 8, 2)).prices
    assert bill(Usage(0, 10**6, 0), first).total == Decimal("0.14")
    with pytest.raises(PricingError, match="output_tokens=5 cannot be billed"):
        bill(Usage(0, 0, 5), first)


def test_nothing_has_no_ratio():
    with pytest.raises(PricingError, match="nothing to divide by"):
        bill_ratio(Usage(0, 0, 0), FLASH)
    with pytest.raises(PricingError, match="without input tokens"):
        effective_input_price(Usage(0, 0, 9), FLASH)


def test_it_needs_the_standard_library_alone():
    code = ("import sys; before = set(sys.modules); import minimodel.pricing\n"
            "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
            "alien = new - set(sys.stdlib_module_names) - {'minimodel'}\n"
            "sys.exit(f'brings {alien}' if alien else 0)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
