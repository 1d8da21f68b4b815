"""A bill on the page: what each pile of tokens cost, and what it would cost without a memory."""

from decimal import Decimal

from minimodel.lesson import palette
from minimodel.lesson.markup import Fragment, escape
from minimodel.pricing import Prices, Usage, advertised_ratio, bill, bill_ratio

# "dollars" in words: two dollar signs in one output would be read as a formula
_HEAD = ("tokens", "count", "dollars per million", "dollars")
_PILES = ("remembered (hit)", "read (miss)", "written")
_MEANINGS = ("hit", "miss", "decode")      # whose colours the piles have
_CSS = (
    ".ss-bill{border-collapse:collapse;margin:.6rem 0;font-size:.95em;"
    "font-variant-numeric:tabular-nums}"
    ".ss-bill caption{caption-side:bottom;text-align:left;padding-top:.4rem;"
    "color:var(--ss-muted,#5b6472)}"
    ".ss-bill th,.ss-bill td{border:0;border-bottom:1px solid var(--ss-grid,#d5dae1);"
    "padding:.3rem 0 .3rem 1.2rem;text-align:right;font-weight:400;background:none}"
    ".ss-bill th:first-child{text-align:left;padding-left:0}"
    ".ss-bill thead th{color:var(--ss-muted,#5b6472)}"
    ".ss-bill tfoot th,.ss-bill tfoot td{font-weight:650;border-bottom:0}"
    f".ss-bill .ss-hit{{color:{palette.text_var('hit')}}}"
    f".ss-bill .ss-miss{{color:{palette.text_var('miss')}}}"
    f".ss-bill .ss-decode{{color:{palette.text_var('decode')}}}"
)


def show_bill(usage: Usage, prices: Prices) -> Fragment:
    """The bill of one request as a small table: count, price and dollars of each pile."""
    owed = bill(usage, prices)
    per_million = _aligned(prices.hit, prices.miss, prices.output)
    *dollars, total = _aligned(owed.hit, owed.miss, owed.output, owed.total)
    counts = [f"{count:,}" for count in (usage.hit_tokens, usage.miss_tokens, usage.output_tokens)]
    rows = list(zip(_PILES, _MEANINGS, counts, per_million, dollars, strict=True))
    remark = _remark(usage, prices)
    return Fragment(_table(rows, total, remark), _lines(rows, total, remark))


def _remark(usage: Usage, prices: Prices) -> str:
    """The ratio that the list advertises, and the one that this bill sees."""
    if not usage.hit_tokens:
        return "Nothing was remembered: this is the full price."
    if not prices.hit:
        return "By this price list, what is remembered is free."
    return (f"Without a memory: {_aligned(bill(usage.all_missed(), prices).total)[0]} dollars, "
            f"{bill_ratio(usage, prices):.1f} times as much. "
            f"By the price list, a token read costs {advertised_ratio(prices):.1f} times "
            "a remembered one.")


def _table(rows: list[tuple], total: str, remark: str) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in _HEAD)
    body = "".join(
        f'<tr><th scope="row" class="ss-{meaning}">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, meaning, *cells in rows)
    return (f"<style>{palette.css_for(_CSS)}{_CSS}</style>"
            f'<table class="ss-bill"><caption>{escape(remark)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
            f'<tfoot><tr><th scope="row">total</th><td></td><td></td><td>{escape(total)}</td></tr>'
            "</tfoot></table>")


def _lines(rows: list[tuple], total: str, remark: str) -> str:
    """The same table in plain text, in columns."""
    table = [_HEAD, *[(name, *cells) for name, _, *cells in rows], ("total", "", "", total)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
             for row in table]
    return "\n".join([*lines, remark])


def _aligned(*amounts: Decimal | None) -> list[str]:
    """Exact amounts, all with as many places as the longest needs; a dash where there is none."""
    places = max(max(-amount.normalize().as_tuple().exponent, 0)
                 for amount in amounts if amount is not None)
    return ["–" if amount is None else f"{amount:.{places}f}" for amount in amounts]
