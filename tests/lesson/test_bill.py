"""A bill on the page says the same in HTML and in plain text."""

import re
from decimal import Decimal

from minimodel.lesson.bill import show_bill
from minimodel.pricing import Prices, Usage, bill, price_list

FLASH = price_list("deepseek-flash").prices


def cells(html: str) -> list[str]:
    return re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", html)


def test_the_worked_example_as_a_table():
    shown = show_bill(Usage(99_000, 1_000, 1_000), FLASH)
    assert cells(shown.html)[4:] == [
        "remembered (hit)", "99,000", "0.003", "0.000297", "read (miss)", "1,000", "0.150",
        "0.000150", "written", "1,000", "0.600", "0.000600", "total", "", "", "0.001047"]
    assert "Without a memory: 0.0156 dollars, 14.9 times as much" in shown.html
    assert "costs 50.0 times a remembered one" in shown.html


def test_plain_text_has_the_same_numbers_in_columns():
    shown = show_bill(Usage(99_000, 1_000, 1_000), FLASH)
    lines = shown.text.splitlines()
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[4].split() == ["total", "0.001047"]
    assert lines[-1] in shown.html
    assert [re.findall(r"[\d.,]+", line)[-1] for line in lines[1:4]] == [
        "0.000297", "0.000150", "0.000600"]


def test_a_first_send_is_told_apart():
    assert "Nothing was remembered" in show_bill(Usage(0, 1_000, 5), FLASH).text
    assert "is free" in show_bill(Usage(3, 0, 0), Prices(0, 1)).text


def test_what_is_shown_adds_up():
    """No pile is rounded, so the reader's own sum is the total that stands there."""
    for usage in (Usage(0, 2_049, 12), Usage(1, 0, 0), Usage(2_048, 1, 7)):
        lines = show_bill(usage, FLASH).text.splitlines()
        hit, miss, output, total = (Decimal(line.split()[-1]) for line in lines[1:5])
        assert hit + miss + output == total == bill(usage, FLASH).total > 0


def test_a_list_without_an_output_price_shows_a_dash():
    row = show_bill(Usage(7, 3, 0), Prices("0.014", "0.14")).text.splitlines()[3]
    assert row.split()[1:3] == ["0", "–"] and Decimal(row.split()[3]) == 0


def test_every_header_cell_says_what_it_heads():
    html = show_bill(Usage(1, 2, 3), FLASH).html
    assert len(re.findall(r'<th scope="(col|row)"', html)) == html.count("<th ") == 8
