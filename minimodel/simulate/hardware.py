"""Chips by their numbers: how much memory, how fast it is read, how fast they multiply.

Every number comes from the claims register (`lesson/facts.csv`); `sources` names its rows, and a
test compares both. FLOP/s are *dense*: spec sheets like to print twice as much, for matrices of
which half is zero. What no source of the register says is None, never a guess.

`usable_share` is an assumption of this book (equation E16), not of a source: the part of the
memory that weights may fill, so that notes, activations and the runtime have the rest.
"""

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp8", "fp4")
GB, GB_PER_S, TB_PER_S, TFLOP_PER_S = 1e9, 1e9, 1e12, 1e12


class UnknownNumberError(LookupError):
    """No source of the register says it; the message names what is known."""


@dataclass(frozen=True)
class Chip:
    """One accelerator as its specifications describe it.

    memory_bytes             all of it; the smaller number where sources differ
    bandwidth_bytes_per_s    of that memory, as printed: a real kernel gets less
    bf16, fp8, fp4           peak dense FLOP/s in that precision, None where not known
    link_bytes_per_s         to its neighbours, both directions added, None where not known
    usable_share             of the memory, for weights: the book's assumption
    sources                  ids of claims, C18 where sources disagree
    note                     what a reader of the numbers must know
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    usable_share: float = 0.8
    sources: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self):
        known = {name: value for name, value in vars(self).items()
                 if name.endswith(("_bytes", "_per_s")) and value is not None}
        for name, value in known.items():
            if not value > 0:
                raise ValueError(f"{self.name}: {name}={value} must be above 0; leave out a rate "
                                 "that no source gives")
        if not 0 < self.usable_share <= 1:
            raise ValueError(f"{self.name}: usable_share={self.usable_share} must be a share of "
                             "the memory, above 0 and at most 1")

    def flops_per_s(self, precision: str) -> float:
        """Peak dense FLOP/s. Raises `UnknownNumberError` where the register has no number."""
        if precision not in PRECISIONS:
            raise UnknownNumberError(f"{precision!r} is no precision here: "
                                     f"choose one of {', '.join(PRECISIONS)}")
        rate = getattr(self, f"{precision}_flops_per_s")
        if rate is None:
            known = ", ".join(self.precisions()) or "none"
            raise UnknownNumberError(f"the register has no {precision} FLOP/s of {self.name}; "
                                     f"known: {known}")
        return rate

    def precisions(self) -> tuple[str, ...]:
        """Those whose FLOP/s are known, the widest first."""
        return tuple(p for p in PRECISIONS if getattr(self, f"{p}_flops_per_s") is not None)

    @property
    def usable_bytes(self) -> float:
        """Memory that weights may fill."""
        return self.memory_bytes * self.usable_share


H100 = Chip("H100", 80 * GB, 3.35 * TB_PER_S,
            bf16_flops_per_s=989.4 * TFLOP_PER_S, fp8_flops_per_s=1978.9 * TFLOP_PER_S,
            link_bytes_per_s=900 * GB_PER_S, sources=("P-HW01", "P-HW02", "P-HW03"))
H800 = Chip("H800", 80 * GB, 3.35 * TB_PER_S,
            bf16_flops_per_s=989.4 * TFLOP_PER_S, fp8_flops_per_s=1978.9 * TFLOP_PER_S,
            link_bytes_per_s=400 * GB_PER_S, sources=("P-HW05", "P-HW02", "P-IS08"),
            note="multiplies like an H100; its link is slower")
H200 = Chip("H200", 141 * GB, 4.8 * TB_PER_S,
            bf16_flops_per_s=989.4 * TFLOP_PER_S, fp8_flops_per_s=1978.9 * TFLOP_PER_S,
            link_bytes_per_s=900 * GB_PER_S, sources=("P-HW04", "P-HW02", "P-HW03"),
            note="multiplies and links like an H100; its memory is larger and faster")
B200 = Chip("B200", 180 * GB, 8 * TB_PER_S,
            bf16_flops_per_s=2250 * TFLOP_PER_S, fp8_flops_per_s=4500 * TFLOP_PER_S,
            fp4_flops_per_s=9000 * TFLOP_PER_S, link_bytes_per_s=1.8 * TB_PER_S,
            sources=("P-HW06", "P-HW07", "P-HW12", "C18"),
            note="sources print 180 or 192 GB, 8 or 7.7 TB/s")
GB300 = Chip("GB300", 279 * GB, 8 * TB_PER_S,
             fp8_flops_per_s=5000 * TFLOP_PER_S, fp4_flops_per_s=15_000 * TFLOP_PER_S,
             link_bytes_per_s=1.8 * TB_PER_S, sources=("P-HW09", "P-HW10", "P-HW12", "C18"),
             note="sources print 279 to 288 GB, and 15 or 13.1 PFLOP/s in FP4")
RTX_5090 = Chip("RTX 5090", 32 * GB, 1.792 * TB_PER_S, usable_share=0.9,
                sources=("P-HW13", "S17"),
                note="no FLOP/s in the register; more of its memory is free for weights, since a "
                     "desktop card serves few requests")
ASCEND_950DT = Chip("Ascend 950DT", 144 * GB, 4 * TB_PER_S,
                    fp8_flops_per_s=1000 * TFLOP_PER_S, fp4_flops_per_s=2000 * TFLOP_PER_S,
                    link_bytes_per_s=2 * TB_PER_S, sources=("P-HW15",),
                    note="the decode part of a pair of chips, one for each phase")
ASCEND_950PR = Chip("Ascend 950PR", 128 * GB, 1.6 * TB_PER_S, sources=("P-HW15",),
                    note="the prefill part: less bandwidth, since reading needs less of it")

CHIPS = {chip.name: chip for chip in (H100, H800, H200, B200, GB300, RTX_5090,
                                      ASCEND_950DT, ASCEND_950PR)}


def chip(name: str) -> Chip:
    """A chip by its name; one that is not listed raises and says which are."""
    try:
        return CHIPS[name]
    except KeyError:
        raise UnknownNumberError(f"no chip is called {name!r} here; "
                                 f"known: {', '.join(CHIPS)}") from None
