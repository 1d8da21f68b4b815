"""A chip's numbers are the register's, and what no source says is refused."""

import re

import pytest

from minimodel.lesson import facts
from minimodel.simulate import hardware
from minimodel.simulate.hardware import CHIPS, Chip, UnknownNumberError, chip

# chip, attribute, claim, which number of its text, what one unit of it is
REGISTER = [
    ("H100", "memory_bytes", "P-HW01", 0, 1e9),
    ("H100", "bandwidth_bytes_per_s", "P-HW01", 1, 1e12),
    ("H100", "bf16_flops_per_s", "P-HW02", 0, 1e12),
    ("H100", "fp8_flops_per_s", "P-HW02", 1, 1e12),
    ("H100", "link_bytes_per_s", "P-HW03", 0, 1e9),
    ("H800", "memory_bytes", "P-HW05", 0, 1e9),
    ("H800", "bandwidth_bytes_per_s", "P-HW05", 1, 1e12),
    ("H800", "link_bytes_per_s", "P-HW05", 2, 1e9),
    ("H800", "link_bytes_per_s", "P-IS08", 0, 1e9),
    ("H800", "bf16_flops_per_s", "P-HW02", 0, 1e12),
    ("H800", "fp8_flops_per_s", "P-HW02", 1, 1e12),
    ("H200", "memory_bytes", "P-HW04", 0, 1e9),
    ("H200", "bandwidth_bytes_per_s", "P-HW04", 1, 1e12),
    ("H200", "bf16_flops_per_s", "P-HW02", 0, 1e12),
    ("H200", "fp8_flops_per_s", "P-HW02", 1, 1e12),
    ("H200", "link_bytes_per_s", "P-HW03", 0, 1e9),
    ("B200", "memory_bytes", "P-HW06", 0, 1e9),
    ("B200", "bandwidth_bytes_per_s", "P-HW06", 1, 1e12),
    ("B200", "bf16_flops_per_s", "P-HW07", 0, 1e12),
    ("B200", "fp8_flops_per_s", "P-HW07", 1, 1e12),
    ("B200", "fp4_flops_per_s", "P-HW07", 2, 1e12),
    ("B200", "link_bytes_per_s", "P-HW12", 0, 1e12),
    ("GB300", "memory_bytes", "P-HW09", 0, 1e9),
    ("GB300", "bandwidth_bytes_per_s", "P-HW09", 2, 1e12),
    ("GB300", "fp4_flops_per_s", "P-HW10", 0, 1e15),
    ("GB300", "fp8_flops_per_s", "P-HW10", 1, 1e15),
    ("GB300", "link_bytes_per_s", "P-HW12", 0, 1e12),
    ("RTX 5090", "memory_bytes", "P-HW13", 0, 1e9),
    ("RTX 5090", "memory_bytes", "S17", 0, 1e9),
    ("RTX 5090", "bandwidth_bytes_per_s", "P-HW13", 1, 1e9),
    ("Ascend 950DT", "memory_bytes", "P-HW15", 0, 1e9),
    ("Ascend 950DT", "bandwidth_bytes_per_s", "P-HW15", 1, 1e12),
    ("Ascend 950DT", "fp8_flops_per_s", "P-HW15", 2, 1e15),
    ("Ascend 950DT", "fp4_flops_per_s", "P-HW15", 3, 1e15),
    ("Ascend 950DT", "link_bytes_per_s", "P-HW15", 4, 1e12),
]
NUMBERS = ("memory_bytes", "bandwidth_bytes_per_s", "bf16_flops_per_s", "fp8_flops_per_s",
           "fp4_flops_per_s", "link_bytes_per_s")


def numbers_in(text: str) -> list[float]:
    """The quantities of a claim: not the 4 of DDR4, FP4 or GDDR7."""
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize(("name", "attribute", "claim", "place", "unit"), REGISTER)
def test_a_number_is_the_registers(name, attribute, claim, place, unit):
    assert claim in chip(name).sources
    stated = numbers_in(facts.find(claim).value)[place] * unit
    assert getattr(chip(name), attribute) == pytest.approx(stated)


def test_the_prefill_chips_numbers_stand_in_a_note():
    note = facts.find("P-HW15").note.split(":")[1]
    reader = hardware.ASCEND_950PR
    assert numbers_in(note) == [reader.memory_bytes / 1e9, reader.bandwidth_bytes_per_s / 1e12]


def test_every_number_of_every_chip_was_compared():
    compared = {(name, attribute) for name, attribute, *_ in REGISTER}
    compared |= {("Ascend 950PR", "memory_bytes"), ("Ascend 950PR", "bandwidth_bytes_per_s")}
    present = {(name, attribute) for name, chip in CHIPS.items() for attribute in NUMBERS
               if getattr(chip, attribute) is not None}
    assert present == compared


@pytest.mark.parametrize("name", CHIPS)
def test_its_sources_are_claims_and_disputes_are_named(name):
    claims = [facts.find(id) for id in chip(name).sources]
    assert claims and all(claim.kind in ("spec", "paper", "video", "conflict") for claim in claims)
    assert ("C18" in chip(name).sources) == (name in ("B200", "GB300"))
    if "C18" in chip(name).sources:
        assert "sources print" in chip(name).note


def test_what_nobody_verified_is_refused():
    with pytest.raises(UnknownNumberError, match="no bf16 FLOP/s of RTX 5090; known: none"):
        hardware.RTX_5090.flops_per_s("bf16")
    with pytest.raises(UnknownNumberError, match="no fp4 FLOP/s of H100; known: bf16, fp8"):
        hardware.H100.flops_per_s("fp4")
    assert hardware.GB300.precisions() == ("fp8", "fp4")
    with pytest.raises(UnknownNumberError, match="'int3' is no precision"):
        hardware.H100.flops_per_s("int3")
    with pytest.raises(UnknownNumberError, match="no chip is called 'h100' here; known: H100"):
        chip("h100")


def test_a_chip_is_frozen_and_must_make_sense():
    with pytest.raises(AttributeError):
        hardware.H100.memory_bytes = 1
    with pytest.raises(ValueError, match="memory_bytes=0 must be above 0"):
        Chip("none", 0, 1e12)
    with pytest.raises(ValueError, match="fp8_flops_per_s=0 must be above 0; leave out a rate"):
        Chip("idle", 1e9, 1e12, fp8_flops_per_s=0)
    with pytest.raises(ValueError, match="usable_share=90 must be a share"):
        Chip("percent", 1e9, 1e12, usable_share=90)


def test_usable_memory_is_the_share_that_weights_may_fill():
    assert hardware.B200.usable_bytes == pytest.approx(144e9)
    assert hardware.RTX_5090.usable_bytes == pytest.approx(28.8e9)
