"""The equations on their worked examples, to the digits that the book gives; and what must hold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.config import ModelConfig
from minimodel.lesson import facts
from minimodel.pricing import price_list
from minimodel.simulate import cost
from minimodel.simulate.cost import CostError, DecodeWork
from minimodel.simulate.hardware import B200, GB300, H100, H200, H800, RTX_5090

FLASH = price_list("deepseek-flash").prices
GIB_PER_S = 2**30
IB_400G = 400e9 / 8                     # 400 Gb/s in bytes a second
V3_KV = cost.kv_bytes_latent(61, 512, 64, 2)
LLAMA_405B_KV = cost.kv_bytes_grouped(126, 8, 128, 2)
V3 = cost.V3_DECODE
POSITIVE = st.floats(1, 1e9)


def about(value, digits=3):
    """Equal to the digits that the worked example prints."""
    return pytest.approx(value, rel=0.5 * 10 ** (1 - digits))


# --- E1 ------------------------------------------------------------------------------------


def test_e1_bytes_per_token_of_the_three_designs():
    assert cost.kv_bytes_grouped(61, 128, 128, 2) == 3_997_696      # V3, were it plain attention
    assert LLAMA_405B_KV == 516_096
    assert V3_KV == 70_272
    assert cost.V41_KV_BYTES_PER_TOKEN == 890
    times_smaller = V3_KV / cost.V41_KV_BYTES_PER_TOKEN
    assert times_smaller == about(79, 2)


def test_e1_the_890_bytes_come_from_the_registers_entries():
    assert facts.find("P-DI09").number == cost.V41_MAIN_ENTRY_BYTES == 288
    assert facts.find("P-DI10").number == cost.V41_INDEX_ENTRY_BYTES == 68
    assert facts.find("P-DI11").number == cost.V41_WINDOW_ENTRY_BYTES == 528
    owners = facts.find("P-DI12").value.replace("(", "").replace(")", "").split()
    assert tuple(int(owner.split(",")[1]) for owner in owners) == cost.V41_TOKENS_PER_ENTRY
    assert facts.find("S39").number == cost.V41_KV_BYTES_PER_TOKEN


def test_e1_a_stored_prefix():
    assert cost.V41_WINDOW_BYTES == 1_415_040
    assert facts.find("P-DI16").number == round(cost.V41_WINDOW_BYTES / 890)
    stored = cost.stored_prefix_bytes(100_000, 890, cost.V41_WINDOW_BYTES)
    assert stored == 89_000_000 + 1_415_040 == about(90.4e6)


def test_e1_is_the_configurations_own_count():
    toy = ModelConfig(num_layers=5, num_kv_heads=2, head_dim=14, num_heads=6)
    assert cost.kv_bytes_grouped(5, 2, 14, 4) == toy.kv_bytes_per_token()


# --- E2, E3 --------------------------------------------------------------------------------


def test_e2_operations():
    assert cost.forward_flops(8e9, 100_000) == 1.6e15
    assert cost.forward_flops(16e9) == 3.2e10
    assert cost.forward_flops(8e9, 100_000) / cost.forward_flops(16e9) == 50_000


@pytest.mark.parametrize(("chip", "precision", "ridge"), [
    (H100, "bf16", 295), (H800, "fp8", 591), (H200, "fp8", 412), (B200, "fp8", 562),
    (GB300, "fp4", 1875)])
def test_e3_ridges(chip, precision, ridge):
    found = cost.ridge_flops_per_byte(chip.flops_per_s(precision), chip.bandwidth_bytes_per_s)
    assert found == pytest.approx(ridge, abs=0.51)


def test_e3_rows_that_reach_the_ridge():
    ridge = cost.ridge_flops_per_byte(H800.flops_per_s("fp8"), H800.bandwidth_bytes_per_s)
    rows = cost.rows_at_ridge(ridge, bytes_per_weight=1)
    assert round(rows) == 295
    assert cost.matmul_intensity(rows, bytes_per_weight=1) == pytest.approx(ridge)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_e3_the_roof_has_two_sides_that_meet_at_the_ridge(intensity, flops_per_s, bandwidth):
    roof = cost.roofline_flops_per_s(intensity, flops_per_s, bandwidth)
    assert roof <= flops_per_s and roof <= intensity * bandwidth * (1 + 1e-12)
    ridge = cost.ridge_flops_per_byte(flops_per_s, bandwidth)
    assert (roof == flops_per_s) == (intensity * bandwidth >= flops_per_s)
    at_ridge = cost.roofline_flops_per_s(ridge, flops_per_s, bandwidth)
    assert at_ridge == pytest.approx(flops_per_s)


# --- E4, E18 -------------------------------------------------------------------------------


def test_e4_the_step_of_a_v3_decode_group():
    batch = facts.find("P-OI08").number / 8 / 21          # tokens a second of one GPU and one user
    context = facts.find("P-OI05").number
    assert round(batch) == 88
    notes = V3.step_bytes(88, context) - V3.weight_bytes
    assert notes == about(30.9e9)
    fetched = V3.step_bytes(88, context)
    assert fetched == about(52.1e9)
    floor_s = cost.step_seconds(fetched, V3.step_flops(88, context),
                                H800.bandwidth_bytes_per_s, H800.flops_per_s("fp8"))
    assert floor_s == about(15.5e-3)
    assert floor_s / (1 / 21) == about(0.33, 2)           # of the observed 47.6 ms


def test_e4_v3s_sizes_are_the_registers():
    layers, heads, latent, rotary = (facts.find(id).number
                                     for id in ("P-V304", "P-V312", "P-V302", "P-V303"))
    assert cost.kv_bytes_latent(layers, latent, rotary, 2) == V3.kv_bytes_per_token == V3_KV
    assert facts.find("P-IS01").number * 1000 == V3_KV
    assert V3.flops_per_entry == layers * heads * 2 * (2 * latent + rotary)
    assert V3.flops_per_token == 2 * float(facts.find("P-V301").value.split("/")[1])


def test_e4_the_weights_of_the_experts():
    expert = 3 * facts.find("P-V310").number * facts.find("P-V311").number      # FP8: a byte each
    assert 3 * 58 * expert == about(7.7e9, 2)
    assert V3.weight_bytes == 7.7e9 + 13.5e9      # and attention and dense layers


def test_e4_takes_the_longer_side_then_the_wires():
    assert cost.step_seconds(60, 700, 20, 100) == 7                # arithmetic
    assert cost.step_seconds(60, 100, 20, 100) == 3                # memory
    assert cost.step_seconds(60, 100, 20, 100, achieved=0.1) == 10
    assert cost.step_seconds(60, 700, 20) == 3                     # memory only
    assert cost.step_seconds(60, 100, 20, 100, communication_s=5) == 8


@pytest.mark.parametrize(("batch", "per_chip", "per_user"), [
    (1, 156, 156), (32, 3308, 103), (128, 6490, 51)])
def test_e18_batch_against_latency(batch, per_chip, per_user):
    step_s = cost.decode_step_seconds(batch, 4989, V3, 3.35e12)
    assert batch / step_s == pytest.approx(per_chip, abs=1.5)       # W is rounded
    assert 1 / step_s == pytest.approx(per_user, abs=0.7)


def test_e18_has_a_limit_that_no_batch_reaches():
    limit = cost.tokens_per_s_limit(4989, V3, 3.35e12)
    assert limit == pytest.approx(9555, abs=1)
    assert 1e6 / cost.decode_step_seconds(1e6, 4989, V3, 3.35e12) == about(limit, 3)


@given(st.integers(1, 500), st.floats(0, 1e5))
def test_e18_more_users_give_more_tokens_and_slower_ones(batch, context):
    fewer, more = (cost.decode_step_seconds(b, context, V3, 3.35e12)
                   for b in (batch, batch + 1))
    assert more >= fewer
    assert (batch + 1) / more > batch / fewer


def test_looking_at_notes_can_be_counted_too():
    work = DecodeWork(weight_bytes=7, flops_per_token=11, kv_bytes_per_token=2, flops_per_entry=3)
    assert work.step_flops(batch=5, context=13) == 5 * (11 + 13 * 3)
    assert work.step_bytes(batch=5, context=13) == 7 + 5 * 13 * 2


def test_the_toys_operations_fit_this_form():
    toy = ModelConfig()
    work = DecodeWork(0, toy.flops(1) - toy.flops_per_entry, toy.kv_bytes_per_token(),
                      toy.flops_per_entry)
    assert work.step_flops(batch=3, context=42) == 3 * toy.flops(1, num_past=41)


# --- E5, E6 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 6.0), (16, 85.5), (64, 243.8), (256, 377.2)])
def test_e5_distinct_experts(tokens, distinct):
    found = cost.expected_distinct_experts(384, 6, tokens)
    assert found == pytest.approx(distinct, abs=0.05)


@pytest.mark.parametrize(("width", "gigabytes", "milliseconds", "rows"), [
    (8, 36.1, 4.51, 8), (64, 4.51, 0.56, 64)])
def test_e5_wide_groups_read_less_and_share_more(width, gigabytes, milliseconds, rows):
    read = cost.expert_bytes_per_step(40, 384, width, 18.8e6)
    assert read == about(gigabytes * 1e9)
    seconds = cost.transfer_seconds(read, 8e12)
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.005)
    assert cost.rows_per_expert(64 * width, 6, 384) == rows


def test_e6_all_to_all():
    exchange = cost.all_to_all_bytes(32, 9, 7_000, bytes_per_number=1 + 2)
    once_s = cost.transfer_seconds(exchange, 50e9)
    assert once_s == pytest.approx(120.96e-6)
    assert facts.find("P-IS04").number == pytest.approx(once_s * 1e6)
    token_s = 2 * 61 * once_s
    assert token_s == about(14.76e-3, 4) and 1 / token_s == about(67.8)
    assert token_s * 50 / 900 == about(0.82e-3, 2)
    sent = cost.all_to_all_bytes(128, 8, 7168, bytes_per_number=1)
    assert sent / 173e-6 == about(42.4e9)


# --- E9 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chips", "days", "stops"), [(64, 33.0, 0.597), (128, 16.5, 0.838),
                                                      (320, 6.6, 0.989)])
def test_e9_a_group_stops_when_one_chip_does(chips, days, stops):
    rate = facts.find("P-LL06").number
    assert rate == about(419 / (54 * 24 * 16_384), 4)
    between = cost.hours_between_stops(rate, chips)
    assert between / 24 == pytest.approx(days, abs=0.05)
    assert cost.chance_of_a_stop(between, 30 * 24) == pytest.approx(stops, abs=5e-4)


def test_e9_a_restart_costs_little_but_everybody_notices():
    between = cost.hours_between_stops(facts.find("P-LL06").number, 64)
    assert cost.unavailable_share(between, 10 / 60) == about(2.1e-4, 2)
    assert cost.chip_hours_lost(64, 10 / 60) == about(10.7)
    assert 100 * 24 / between == about(3.0, 2)                  # stops a day of 100 groups


@pytest.mark.parametrize("wrong", [lambda: cost.hours_between_stops(0, 64),
                                   lambda: cost.hours_between_stops(1e-5, 0),
                                   lambda: cost.unavailable_share(10, -1),
                                   lambda: cost.chance_of_a_stop(0, 1),
                                   lambda: cost.chip_hours_lost(64, -1)])
def test_e9_refuses_what_no_group_can_have(wrong):
    with pytest.raises(cost.CostError, match="check its"):
        wrong()


# --- E13, E14 ------------------------------------------------------------------------------


def test_e13_waste():
    assert cost.contiguous_waste(400, 2048) == about(0.805)
    assert cost.paged_waste(400, 16) == about(0.018, 2)
    assert cost.paged_waste(400, 128) == about(0.137)
    assert cost.paged_waste(12_035, 128) == pytest.approx(0.005, abs=0.0005)
    assert cost.paged_waste(400, 1) == 0


def test_e14_the_bill():
    assert float(cost.bill_ratio_at(100_000, 1_000, 0.99, FLASH)) == about(14.9)
    assert float(cost.bill_ratio_at(100_000, 0, 0.99, FLASH)) == about(33.6)
    assert cost.bill_ratio_at(100_000, 0, 1, FLASH) == 50
    assert cost.bill_ratio_at(100_000, 1_000, 0, FLASH) == 1


# --- E15 to E17 ----------------------------------------------------------------------------


def test_e15_handoff():
    window = 40 * (128 + 6) * cost.V41_WINDOW_ENTRY_BYTES          # here all 40 layers send theirs
    assert window == about(2.8e6, 2)
    flash = cost.handoff_seconds(100_000, 890, IB_400G, window_bytes=window)
    assert flash == about(1.8e-3, 2)
    assert cost.handoff_seconds(100_000, V3_KV, IB_400G) == about(141e-3)
    assert cost.handoff_seconds(100_000, LLAMA_405B_KV, IB_400G) == about(1.032, 4)


def test_e16_fit():
    checkpoint = facts.find("P-V411").number * 1e9
    assert cost.chips_filled(checkpoint, B200) == about(3.5, 2)
    assert cost.chips_needed(checkpoint, B200) == 4
    assert cost.chips_filled(checkpoint, RTX_5090) == about(17.7)
    assert cost.chips_needed(checkpoint, RTX_5090) == 18
    at_four_bits = facts.find("S11").number * 4 / 8
    assert at_four_bits == 276e9
    assert at_four_bits / RTX_5090.memory_bytes == about(8.6, 2)


def test_e17_first_token():
    flash_on_b200 = {"kv_bytes_per_token": 890, "read_bytes_per_s": 2 * GIB_PER_S,
                     "active_parameters": 8e9, "flops_per_s": B200.flops_per_s("fp8"),
                     "achieved": 0.4}
    miss = cost.ttft_seconds(100_000, 0, **flash_on_b200)
    hit = cost.ttft_seconds(100_000, 0.99, **flash_on_b200)
    assert miss == about(0.889)
    assert hit == about(0.041 + 0.009, 2) == about(0.050, 2)
    assert cost.ttft_seconds(100_000, 0, queue_s=2, **flash_on_b200) == pytest.approx(2 + miss)


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "said"), [
    (lambda: cost.intensity_flops_per_byte(1, 0), "num_bytes=0 must be above 0"),
    (lambda: cost.step_seconds(1, 1, 0), "bandwidth_bytes_per_s=0 must be above 0"),
    (lambda: V3.step_bytes(0, 100), "batch=0 must be above 0"),
    (lambda: cost.tokens_per_s_limit(0, V3, 1e12), "context=0 must be above 0"),
    (lambda: cost.expected_distinct_experts(6, 384, 3), r"chosen_share=64\.0 must be a share"),
    (lambda: cost.bill_ratio_at(100, 1, 99, FLASH), "hit_share=99 must be a share from 0 to 1"),
    (lambda: cost.contiguous_waste(900, 400), "mean_tokens=900 is over max_tokens=400"),
    (lambda: cost.paged_waste(400, 0), "block_size=0 must be above 0"),
    (lambda: cost.chips_needed(math.nan, B200), "weight_bytes=nan must be above 0"),
    (lambda: V3.step_bytes(3, -100), "context=-100 must be 0 or more"),
    (lambda: V3.step_flops(3, math.nan), "context=nan must be 0 or more"),
    (lambda: DecodeWork(7, -11, 2), "flops_per_token=-11 must be 0 or more"),
    (lambda: cost.step_seconds(-1, 1, 20), "num_bytes=-1 must be 0 or more"),
    (lambda: cost.transfer_seconds(-3, 20), "num_bytes=-3 must be 0 or more"),
    (lambda: cost.forward_flops(8e9, -2), "tokens=-2 must be 0 or more"),
    (lambda: cost.expected_distinct_experts(0, 6, 3), "experts=0 must be above 0"),
    (lambda: cost.kv_bytes_grouped(61, 0, 128, 2), "kv_heads=0 must be above 0"),
    (lambda: cost.kv_bytes_shared(356, (2, 0, 1)), "tokens_per_entry=0 must be above 0"),
    (lambda: cost.ridge_flops_per_byte(-1, 20), "flops_per_s=-1 must be above 0"),
    (lambda: cost.ttft_seconds(-5, 0.5, kv_bytes_per_token=890, read_bytes_per_s=1,
                               active_parameters=1, flops_per_s=1), "tokens=-5 must be 0 or more"),
])
def test_impossible_arguments_are_refused(call, said):
    with pytest.raises(CostError, match=said):
        call()


def test_e15_layers_in_turn_and_overlapped():
    assert cost.in_turn_seconds(4, 3.0, 5.0) == 32.0
    assert cost.overlapped_seconds(4, 3.0, 5.0) == 3 + 3 * 5 + 5
    assert cost.overlapped_seconds(4, 5.0, 3.0) == 5 + 3 * 5 + 3
    assert cost.overlapped_seconds(1, 5.0, 3.0) == cost.in_turn_seconds(1, 5.0, 3.0)
    assert cost.handoff_seconds(100_000, 890, 50e9) == about(1.78e-3)
