"""What a request costs: DeepSeek's price lists by date, a request's usage, and its bill.

A service that remembers your prompt counts input tokens in two piles: *hits*, whose
notes it still has, and *misses*, which it must read. Each pile has its own price, and so
has every token written. The bill is three products and a sum (the book's equation E14):

    bill = hit tokens x hit price + miss tokens x miss price + output tokens x output price

Money is exact here: prices are decimal numbers, as they are printed, never binary floats.
Every list names its claims in the register of facts (`lesson/facts.csv`), such as P-PR01.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation

MILLION = 1_000_000

# Claim P-PR10. China's public holidays are off-peak all day and are *not* modelled here:
# on such a day a bill for one of these hours comes out twice as high as it was.
PEAK_HOURS_UTC = ((1, 4), (6, 10))      # from the first hour on, up to the second; Monday to Friday
PEAK_FACTOR = 2


class PricingError(ValueError):
    """A price, a usage or a moment that no bill can be made of; the message says what to do."""


def _exact(name: str, value: object) -> Decimal:
    """A price as a decimal; raises for floats, for what is no number, and below zero."""
    rule = "a price is dollars per million tokens, as a text such as '0.15', at least 0"
    if isinstance(value, (float, bool)):
        raise PricingError(f"{name}={value!r} is not exact: {rule}")
    try:
        exact = Decimal(value)
    except (InvalidOperation, TypeError, ValueError):
        raise PricingError(f"{name}={value!r} is no number: {rule}") from None
    if not exact.is_finite() or exact < 0:
        raise PricingError(f"{name}={value!r} is no price: {rule}")
    return exact


def _moment(when: date | datetime) -> datetime:
    """A moment in UTC; a plain date is its noon."""
    if not isinstance(when, date):
        raise PricingError(f"when={when!r} must be a date or a datetime with a time zone")
    if not isinstance(when, datetime):
        return datetime.combine(when, time(12), tzinfo=UTC)
    if when.tzinfo is None:
        raise PricingError(f"when={when!r} has no time zone: add tzinfo=datetime.UTC")
    return when.astimezone(UTC)


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens: read from a cache, read afresh, written.

    Each is a decimal, or a text or whole number that becomes one; a float is refused, since
    0.15 has no exact binary form. `output` is None where a list is known for input only.
    """

    hit: Decimal
    miss: Decimal
    output: Decimal | None = None

    def __post_init__(self):
        for name in ("hit", "miss", "output"):
            value = getattr(self, name)
            if not (name == "output" and value is None):
                object.__setattr__(self, name, _exact(name, value))

    def times(self, factor: int) -> "Prices":
        """The same list, so many times as dear."""
        output = None if self.output is None else self.output * factor
        return Prices(self.hit * factor, self.miss * factor, output)


@dataclass(frozen=True)
class PriceList:
    """What a model cost in one stretch of time, [valid_from, valid_to), outside peak hours.

    valid_from  the change as announced; where that is not known, the first day on which a
                public copy shows the list
    valid_to    when the next list took over, or None while no later one is known
    has_peak    whether weekday peak hours cost twice as much
    sources     ids of claims in the register of facts
    """

    model: str
    valid_from: datetime
    valid_to: datetime | None
    prices: Prices
    has_peak: bool
    sources: tuple[str, ...]

    def holds(self, moment: datetime) -> bool:
        """Whether this is the list at that moment."""
        ended = self.valid_to is not None and moment >= self.valid_to
        return self.valid_from <= moment and not ended

    def prices_at(self, when: date | datetime) -> Prices:
        """The prices in force at a moment of this list: doubled in a peak hour, if it has those."""
        moment = _moment(when)
        if not self.holds(moment):
            raise PricingError(f"this list of {self.model} does not hold on {moment:%Y-%m-%d}: "
                               f"it runs {self.period()}; ask price_list() for the right one")
        return self.prices.times(PEAK_FACTOR) if self.has_peak and is_peak(moment) else self.prices

    def period(self) -> str:
        """From when to when, in words."""
        end = f"until {self.valid_to:%Y-%m-%d}" if self.valid_to else "on"
        return f"from {self.valid_from:%Y-%m-%d} {end}"


@dataclass(frozen=True)
class Usage:
    """What one request used, in the three counts that DeepSeek's API reports."""

    hit_tokens: int         # prompt_cache_hit_tokens: their notes were found
    miss_tokens: int        # prompt_cache_miss_tokens: read afresh
    output_tokens: int      # completion_tokens: written
    disk_hit_tokens: int = 0    # of the hits, those from disk: the price is the same

    def __post_init__(self):
        for name in ("hit_tokens", "miss_tokens", "output_tokens", "disk_hit_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PricingError(f"{name}={value!r} must be a whole number of tokens, at least 0")
        if self.disk_hit_tokens > self.hit_tokens:
            raise PricingError(f"disk_hit_tokens={self.disk_hit_tokens} are a part of the "
                               f"{self.hit_tokens} hit tokens and cannot be more")

    @classmethod
    def from_api(cls, usage: dict) -> "Usage":
        """Read the `usage` object of an API response (claim P-KV03)."""
        names = ("prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "completion_tokens")
        missing = [name for name in names if name not in usage]
        if missing:
            raise PricingError(f"the usage lacks {', '.join(missing)}: pass the response's whole "
                               "`usage` object")
        return cls(*(usage[name] for name in names))

    @property
    def input_tokens(self) -> int:
        """The whole prompt: hits and misses."""
        return self.hit_tokens + self.miss_tokens

    def all_missed(self) -> "Usage":
        """The same request to a service that remembers nothing."""
        return Usage(0, self.input_tokens, self.output_tokens)


@dataclass(frozen=True)
class Bill:
    """Dollars for each pile of tokens, exact."""

    hit: Decimal
    miss: Decimal
    output: Decimal

    @property
    def input(self) -> Decimal:
        return self.hit + self.miss

    @property
    def total(self) -> Decimal:
        return self.input + self.output


def _utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)


_PEAK_BILLING = _utc(2026, 8, 16, 16)       # peak and off-peak prices begin; all V4 prices change

# Every list that the register knows; of the time between them it knows none. The lists of 2025
# had a nightly discount from late February on, which is not modelled either.
PRICE_LISTS = (
    PriceList("deepseek-chat", _utc(2024, 8, 2), _utc(2025, 2, 8, 16),
              Prices("0.014", "0.14"), False, ("P-PR15",)),
    PriceList("deepseek-chat", _utc(2025, 2, 8, 16), _utc(2025, 9, 5, 16),
              Prices("0.07", "0.27", "1.10"), False, ("P-PR14",)),
    PriceList("deepseek-reasoner", _utc(2025, 1, 20), _utc(2025, 9, 5, 16),
              Prices("0.14", "0.55", "2.19"), False, ("P-OI19",)),
    PriceList("deepseek-v4-flash", _utc(2026, 6, 22), _PEAK_BILLING,
              Prices("0.0028", "0.14", "0.28"), False, ("P-PR11",)),
    PriceList("deepseek-v4-pro", _utc(2026, 6, 22), _PEAK_BILLING,
              Prices("0.003625", "0.435", "0.87"), False, ("P-PR12",)),
    PriceList("deepseek-v4-flash", _PEAK_BILLING, _utc(2026, 9, 10, 4),
              Prices("0.007", "0.22", "0.66"), True, ("P-PR13",)),
    PriceList("deepseek-v4-pro", _PEAK_BILLING, None,
              Prices("0.022", "0.66", "1.98"), True, ("P-PR07", "P-PR08", "P-PR09")),
    PriceList("deepseek-flash", _utc(2026, 9, 10, 4), None,
              Prices("0.003", "0.15", "0.60"), True, ("P-PR01", "P-PR03", "P-PR05")),
)


def is_peak(when: date | datetime) -> bool:
    """Whether a moment lies in a peak hour, holidays left aside (claims S56 and P-PR10)."""
    moment = _moment(when)
    return moment.weekday() < 5 and any(first <= moment.hour < last
                                        for first, last in PEAK_HOURS_UTC)


def price_list(model: str, when: date | datetime | None = None) -> PriceList:
    """A model's list at a moment; without one, its latest.

    A plain date means noon UTC of that day, which is off-peak. An unknown model, a date before
    the model's first list and a stretch that no list covers raise `PricingError`.
    """
    lists = sorted((one for one in PRICE_LISTS if one.model == model),
                   key=lambda one: one.valid_from)
    if not lists:
        known = ", ".join(sorted({one.model for one in PRICE_LISTS}))
        raise PricingError(f"no price list of model {model!r}; the known models are {known}")
    if when is None:
        return lists[-1]
    moment = _moment(when)
    for one in lists:
        if one.holds(moment):
            return one
    before = "its first list is later" if moment < lists[0].valid_from else "no list covers that"
    periods = "; ".join(one.period() for one in lists)
    raise PricingError(f"no prices of {model} on {moment:%Y-%m-%d}: {before}. "
                       f"Choose a date in one of these: {periods}")


def bill(usage: Usage, prices: Prices) -> Bill:
    """Dollars for one request, pile by pile."""
    if prices.output is None and usage.output_tokens:
        raise PricingError(f"output_tokens={usage.output_tokens} cannot be billed: this list has "
                           "input prices only; set output_tokens to 0, or take a later list")
    piles = ((usage.hit_tokens, prices.hit), (usage.miss_tokens, prices.miss),
             (usage.output_tokens, prices.output or Decimal(0)))
    return Bill(*(tokens * price / MILLION for tokens, price in piles))


def effective_input_price(usage: Usage, prices: Prices) -> Decimal:
    """Dollars per million input tokens, hits and misses mixed as this request mixes them."""
    if not usage.input_tokens:
        raise PricingError("a request without input tokens has no price per input token; "
                           "give it hit_tokens or miss_tokens")
    return bill(usage, prices).input * MILLION / usage.input_tokens


def advertised_ratio(prices: Prices) -> Decimal:
    """How many times a missed token costs a hit one: the ratio of the price list itself."""
    return _ratio(prices.miss, prices.hit)


def input_ratio(usage: Usage, prices: Prices) -> Decimal:
    """How many times the input would cost if nothing were remembered."""
    return _ratio(bill(usage.all_missed(), prices).input, bill(usage, prices).input)


def bill_ratio(usage: Usage, prices: Prices) -> Decimal:
    """How many times the whole bill, output and all, would be if nothing were remembered."""
    return _ratio(bill(usage.all_missed(), prices).total, bill(usage, prices).total)


def _ratio(dear: Decimal, cheap: Decimal) -> Decimal:
    if not cheap:
        raise PricingError("nothing to divide by: this request or price is free; "
                           "give it tokens and a price above 0")
    return dear / cheap
