"""What serving costs on paper: the book's equations, each a small function.

Every function carries its equation's number (E1 to E6, E9, and E13 to E18) and is tested on that
equation's worked example. Units stand in the names: bytes, FLOPs (operations), seconds; a rate
ends in `_per_s`. Numbers may be floats: a hundred thousand tokens times a fraction is no integer.

These are *bounds and estimates*, the least a step can take on a chip that did nothing else. The
simulator adds queues and neighbours to them; real systems take longer than either.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from ..pricing import Prices, Usage, bill_ratio
from .hardware import Chip


class CostError(ValueError):
    """An argument that no machine can have; the message names it, its limit and the remedy."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise CostError(f"{name}={value} must be above 0 and finite: check its unit")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise CostError(f"{name}={value} must be 0 or more and finite: check its sign")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise CostError(f"{name}={value} must be a share from 0 to 1: divide a percentage by "
                            "100")


# --- E1: bytes of notes --------------------------------------------------------------------


def kv_bytes_grouped(layers: int, kv_heads: int, head_dim: int, bytes_per_number: float) -> float:
    """E1 for plain and grouped-query attention: a key and a value per token, layer and KV head."""
    _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim,
              bytes_per_number=bytes_per_number)
    return 2 * layers * kv_heads * head_dim * bytes_per_number


def kv_bytes_latent(layers: int, latent: int, rotary: int, bytes_per_number: float) -> float:
    """E1 for multi-head latent attention: one latent and one rotary key per token and layer."""
    _positive(layers=layers, latent=latent, bytes_per_number=bytes_per_number)
    _not_negative(rotary=rotary)
    return layers * (latent + rotary) * bytes_per_number


def packed_bytes(numbers: int, bits: int, numbers_per_scale: int) -> float:
    """Bytes of `numbers` in few bits, with a scale of one byte for each small group of them."""
    _positive(numbers=numbers, bits=bits, numbers_per_scale=numbers_per_scale)
    return numbers * bits / 8 + numbers / numbers_per_scale


def kv_bytes_shared(entry_bytes: float, tokens_per_entry: Iterable[int]) -> float:
    """E1 for notes that layers share: only owners keep entries, one for so many tokens each."""
    tokens_per_entry = tuple(tokens_per_entry)
    for tokens in tokens_per_entry:
        _positive(tokens_per_entry=tokens)
    return sum(entry_bytes / tokens for tokens in tokens_per_entry)


# DeepSeek-V4.1-Flash, from the engine's source (claims P-DI09 to P-DI12 and P-DI14)
V41_MAIN_ENTRY_BYTES = packed_bytes(512, bits=4, numbers_per_scale=16)
V41_INDEX_ENTRY_BYTES = packed_bytes(128, bits=4, numbers_per_scale=32)
V41_WINDOW_ENTRY_BYTES = packed_bytes(512, bits=8, numbers_per_scale=32)
V41_TOKENS_PER_ENTRY = (2, 2, 2, 1)         # of its four layers that own notes
V41_KV_BYTES_PER_TOKEN = kv_bytes_shared(V41_MAIN_ENTRY_BYTES + V41_INDEX_ENTRY_BYTES,
                                         V41_TOKENS_PER_ENTRY)
V41_WINDOW_BYTES = 20 * (128 + 6) * V41_WINDOW_ENTRY_BYTES      # 20 layers store it with a prefix


def stored_prefix_bytes(tokens: float, kv_bytes_per_token: float, window_bytes: float) -> float:
    """E1: what a store keeps of a prefix, its tokens' notes and one snapshot of the window."""
    _not_negative(tokens=tokens, kv_bytes_per_token=kv_bytes_per_token, window_bytes=window_bytes)
    return tokens * kv_bytes_per_token + window_bytes


# --- E2, E3: operations, bytes, and the roofline -------------------------------------------


def forward_flops(active_parameters: float, tokens: float = 1) -> float:
    """E2: two operations per active parameter and token. Attention's own are left out."""
    _not_negative(active_parameters=active_parameters, tokens=tokens)
    return 2 * active_parameters * tokens


def intensity_flops_per_byte(flops: float, num_bytes: float) -> float:
    """E3: operations for each byte that is fetched from memory."""
    _positive(num_bytes=num_bytes)
    _not_negative(flops=flops)
    return flops / num_bytes


def matmul_intensity(rows: float, bytes_per_weight: float) -> float:
    """E3 for one weight matrix: each weight, once fetched, serves two operations a row."""
    return intensity_flops_per_byte(2 * rows, bytes_per_weight)


def ridge_flops_per_byte(flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """E3: the intensity at which memory and arithmetic take equally long."""
    _positive(flops_per_s=flops_per_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return flops_per_s / bandwidth_bytes_per_s


def rows_at_ridge(ridge: float, bytes_per_weight: float) -> float:
    """E3, solved for the rows: how many must share a weight until it is no longer waited for."""
    _positive(ridge=ridge, bytes_per_weight=bytes_per_weight)
    return ridge * bytes_per_weight / 2


def roofline_flops_per_s(intensity: float, flops_per_s: float,
                         bandwidth_bytes_per_s: float) -> float:
    """The most operations a second that work of this intensity can reach (Williams and others)."""
    return min(flops_per_s, intensity * bandwidth_bytes_per_s)


# --- E4, E18: a decode step ----------------------------------------------------------------


@dataclass(frozen=True)
class DecodeWork:
    """What a decode step asks of one chip: a part that requests share, and a part each brings.

    weight_bytes          fetched once a step, whatever the batch
    flops_per_token       2 per active parameter (E2), on average over the chips of a group
    kv_bytes_per_token    notes of one token, all layers (E1)
    flops_per_entry       to look at one token's notes, all layers; 0 leaves attention out (E2)
    """

    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    flops_per_entry: float = 0.0

    def __post_init__(self):
        _not_negative(**vars(self))

    def step_bytes(self, batch: float, context: float) -> float:
        """Bytes one step fetches: the weights, and `context` tokens' notes of each request."""
        _positive(batch=batch)
        _not_negative(context=context)
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def step_flops(self, batch: float, context: float) -> float:
        """Operations of one step."""
        _positive(batch=batch)
        _not_negative(context=context)
        return batch * (self.flops_per_token + context * self.flops_per_entry)


# DeepSeek-V3 on each of 144 chips in FP8, the attention of its own requests (E4): three experts in
# each of 58 layers (claim P-OI16) take 7.7 GB, everything else 13.5 GB. 37e9 active parameters
# (P-V301), 61 layers of 128 heads that look at latents as they are (P-V302 to P-V304, P-V312).
V3_DECODE = DecodeWork(weight_bytes=21.2e9, flops_per_token=forward_flops(37e9),
                       kv_bytes_per_token=kv_bytes_latent(61, 512, 64, 2),
                       flops_per_entry=61 * 128 * 2 * (512 + 64 + 512))


def step_seconds(num_bytes: float, flops: float, bandwidth_bytes_per_s: float,
                 flops_per_s: float = math.inf, achieved: float = 1.0,
                 communication_s: float = 0.0) -> float:
    """E4: fetching and computing overlap, so a step takes the longer of both; then the wires.

    `achieved` is the share of the peak rate that the arithmetic reaches. Without `flops_per_s`
    only memory is counted.
    """
    _positive(bandwidth_bytes_per_s=bandwidth_bytes_per_s, achieved=achieved)
    _not_negative(num_bytes=num_bytes, flops=flops, communication_s=communication_s)
    fetching_s = num_bytes / bandwidth_bytes_per_s
    computing_s = flops / (achieved * flops_per_s)
    return max(fetching_s, computing_s) + communication_s


def decode_step_seconds(batch: float, context: float, work: DecodeWork,
                        bandwidth_bytes_per_s: float) -> float:
    """E18: t(B) = a + c B, the weights' time and, for each request, its notes' time."""
    return step_seconds(work.step_bytes(batch, context), 0.0, bandwidth_bytes_per_s)


def tokens_per_s_limit(context: float, work: DecodeWork, bandwidth_bytes_per_s: float) -> float:
    """E18: 1 / c, the throughput that no batch reaches, since notes are not shared."""
    _positive(context=context, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return bandwidth_bytes_per_s / (context * work.kv_bytes_per_token)


# --- E5, E6: experts on many chips ---------------------------------------------------------


def expected_distinct_experts(experts: int, experts_per_token: int, tokens: float) -> float:
    """E5: experts that at least one of `tokens` chooses, if they choose evenly and alone."""
    _positive(experts=experts)
    _not_negative(tokens=tokens)
    _share(chosen_share=experts_per_token / experts)
    return experts * (1 - (1 - experts_per_token / experts) ** tokens)


def expert_bytes_per_step(layers: int, experts: int, width: int, expert_bytes: float) -> float:
    """E5: expert weights that one of `width` chips reads a step, if all of its own are wanted."""
    _positive(width=width)
    return layers * experts / width * expert_bytes


def rows_per_expert(tokens: float, experts_per_token: int, experts: int) -> float:
    """E5: rows that share an expert's weights, for `tokens` in the whole group's step."""
    _positive(experts=experts)
    return tokens * experts_per_token / experts


def all_to_all_bytes(tokens: float, copies: int, hidden: int, bytes_per_number: float) -> float:
    """E6: what a chip sends in a layer, each token's row to every expert it chose.

    `bytes_per_number` is one way's, or the sum of both (dispatch and combine).
    """
    return tokens * copies * hidden * bytes_per_number


def transfer_seconds(num_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """E6 and E15: bytes over a wire, or from a store; starting it takes no time here."""
    _positive(bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    _not_negative(num_bytes=num_bytes)
    return num_bytes / bandwidth_bytes_per_s


# --- E9: groups that fail --------------------------------------------------------------------


def hours_between_stops(failures_per_chip_hour: float, chips: int) -> float:
    """E9: one failed chip stops its whole group, so a group of many stops often."""
    _positive(failures_per_chip_hour=failures_per_chip_hour, chips=chips)
    return 1 / (failures_per_chip_hour * chips)


def unavailable_share(hours_between: float, restart_hours: float) -> float:
    """E9: of all time, spent restarting."""
    _positive(hours_between=hours_between)
    _not_negative(restart_hours=restart_hours)
    return restart_hours / (hours_between + restart_hours)


def chance_of_a_stop(hours_between: float, hours: float) -> float:
    """E9: that a group stops at least once in so many hours."""
    _positive(hours_between=hours_between)
    _not_negative(hours=hours)
    return 1 - math.exp(-hours / hours_between)


def chip_hours_lost(chips: int, restart_hours: float) -> float:
    """E9: by one stop; the failed chip's repair is not counted."""
    _positive(chips=chips)
    _not_negative(restart_hours=restart_hours)
    return chips * restart_hours


# --- E13, E14: memory set aside, money -----------------------------------------------------


def contiguous_waste(mean_tokens: float, max_tokens: float) -> float:
    """E13: share of the memory that stays empty if every request reserves the longest length."""
    _positive(mean_tokens=mean_tokens)
    if mean_tokens > max_tokens:
        raise CostError(f"mean_tokens={mean_tokens} is over max_tokens={max_tokens}: a mean "
                        "cannot exceed the longest")
    return 1 - mean_tokens / max_tokens


def paged_waste(mean_tokens: float, block_size: int) -> float:
    """E13: share that stays empty if only the last block of a request is partly filled."""
    _positive(mean_tokens=mean_tokens, block_size=block_size)
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)


def bill_ratio_at(prompt_tokens: int, output_tokens: int, hit_share: float,
                  prices: Prices) -> Decimal:
    """E14: how many times a bill would be if nothing were remembered, at this share of hits."""
    _share(hit_share=hit_share)
    hits = round(prompt_tokens * hit_share)
    return bill_ratio(Usage(hits, prompt_tokens - hits, output_tokens), prices)


# --- E15 to E17: moving notes, fitting weights, the first token ----------------------------


def handoff_seconds(tokens: float, kv_bytes_per_token: float, bandwidth_bytes_per_s: float,
                    window_bytes: float = 0.0) -> float:
    """E15: a prompt's notes sent from the chip that read it to the one that will write."""
    return transfer_seconds(stored_prefix_bytes(tokens, kv_bytes_per_token, window_bytes),
                            bandwidth_bytes_per_s)


def in_turn_seconds(num_layers: int, load_s: float, compute_s: float) -> float:
    """E15: all layers loaded, then all computed. Both times are those of one layer."""
    _positive(num_layers=num_layers)
    _not_negative(load_s=load_s, compute_s=compute_s)
    return num_layers * (load_s + compute_s)


def overlapped_seconds(num_layers: int, load_s: float, compute_s: float) -> float:
    """E15: each layer computed when it is here and the one before is done: the slower of both
    counts."""
    _positive(num_layers=num_layers)
    _not_negative(load_s=load_s, compute_s=compute_s)
    return load_s + (num_layers - 1) * max(load_s, compute_s) + compute_s


def chips_filled(weight_bytes: float, chip: Chip) -> float:
    """E16: weights over the usable memory of one chip."""
    _positive(weight_bytes=weight_bytes)
    return weight_bytes / chip.usable_bytes


def chips_needed(weight_bytes: float, chip: Chip) -> int:
    """E16: whole chips until the weights fit."""
    return math.ceil(chips_filled(weight_bytes, chip))


def ttft_seconds(tokens: float, hit_share: float, *, kv_bytes_per_token: float,
                 read_bytes_per_s: float, active_parameters: float, flops_per_s: float,
                 achieved: float = 1.0, queue_s: float = 0.0) -> float:
    """E17: wait in the queue, load the notes of the hits, compute the misses (attention left out).

    `achieved` is the share of the peak rate that prefill reaches.
    """
    _positive(flops_per_s=flops_per_s, achieved=achieved)
    _not_negative(tokens=tokens, queue_s=queue_s)
    _share(hit_share=hit_share)
    load_s = transfer_seconds(hit_share * tokens * kv_bytes_per_token, read_bytes_per_s)
    misses = tokens * (1 - hit_share)
    return queue_s + load_s + forward_flops(active_parameters, misses) / (achieved * flops_per_s)
