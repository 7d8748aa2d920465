"""fp32 to bf16 by a random choice of the two neighbours, right on average: for weights that have no fp32 master.

    low  = the 16 bits that bf16 lacks;  r uniform in [0, 65536)
    out  = the bf16 above (in magnitude) if low + r >= 65536, else the one below

so it rounds up with probability `low / 65536`: the mean of the result is the value, denormals included, and what bf16
holds exactly stays. Infinities stay, a NaN stays a NaN, and a finite value never becomes infinite: beyond the largest
finite bf16, where no mean could be kept, it becomes that one.

`r` is a function of (seed, step, stream, element), and of nothing else: Philox4x32-10 (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3") with the key `seed` and the counter (c low, c high, step, stream). One call yields
eight draws of 16 bits. Element i lies in tile i // 8192, lane i % 8192 // 1024, and

    c = 1024 * tile + i % 1024;    draw = half lane % 2 (low first) of word lane // 2

so that a program makes 1024 calls for 8192 elements and reads and writes each lane as one run of neighbours. Where the
elements are anywhere (`draws_at`, for `fused_step`) each has a call of its own, and the same draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels import cards
from zenflow_kernels.dispatch import on_device, tl, triton, uses_triton

SPAN = 1024  # elements of a lane; with LANES part of what the draws are, not a tuning knob
LANES = 8  # draws of 16 bits in one Philox call
WARPS = 4
N_SPAN, N_LANES = tl.constexpr(SPAN), tl.constexpr(LANES)
PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
CHUNK_TILES = 64  # the reference's int64 arithmetic on so many tiles at once stays in a CPU's cache
GPU_CHUNK_TILES = 8192  # on a GPU fewer and larger pieces: 64M elements

# Bits of an fp32 number; LARGEST is above every bf16, and its upper half the largest finite one.
SIGN_BIT, MAGNITUDE_BITS, INF_BITS, LARGEST_BITS, QUIET_BIT = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x400000
SIGN, MAGNITUDE, INF = tl.constexpr(SIGN_BIT), tl.constexpr(MAGNITUDE_BITS), tl.constexpr(INF_BITS)
LARGEST, QUIET = tl.constexpr(LARGEST_BITS), tl.constexpr(QUIET_BIT)


@triton.jit
def round_to_bf16(x, r):
    """bf16 of fp32 `x` with the draw `r`, uint32 in [0, 65536)."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & MAGNITUDE
    rounded = tl.minimum(magnitude + r, LARGEST)
    # Of a NaN the payload's upper bits, made quiet: its lower bits alone would leave an infinity.
    kept = tl.where(magnitude > INF, magnitude | QUIET, magnitude)
    chosen = tl.where(magnitude < INF, rounded, kept) | (bits & SIGN)
    return (chosen >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _words(counter, seed_low, seed_high, step, stream):
    """The four words of the calls `counter`, int64; the numbers are int32 scalars with the bits of unsigned ones."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    seed = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = seed | (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    zero = low * 0
    return tl.philox(
        seed, low, (counter >> 32).to(tl.uint32), zero + step.to(tl.uint32, bitcast=True),
        zero + stream.to(tl.uint32, bitcast=True),
    )  # fmt: skip


@triton.jit
def draws_at(place, seed_low, seed_high, step, stream):
    """uint32 in [0, 65536): the draws of the elements `place`, int64, by one call each; the numbers as in `_words`."""
    counter = (place // (N_SPAN * N_LANES)) * N_SPAN + place % N_SPAN
    lane = ((place // N_SPAN) % N_LANES).to(tl.int32)
    first, second, third, fourth = _words(counter, seed_low, seed_high, step, stream)
    word = tl.where(lane < 4, tl.where(lane < 2, first, second), tl.where(lane < 6, third, fourth))
    return tl.where(lane % 2 == 0, word, word >> 16) & 0xFFFF


@triton.jit(do_not_specialize=["n", "seed_low", "seed_high", "step", "stream"])
def _round_kernel(
    x_ptr,
    out_ptr,
    n, seed_low, seed_high, step, stream,
    SPAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, SPAN)
    words = _words(tile * SPAN + offs, seed_low, seed_high, step, stream)  # each [SPAN]
    begin = tile * (SPAN * LANES)
    left = n - begin
    x_ptr += begin
    out_ptr += begin
    for lane in tl.static_range(LANES):
        r = (words[lane // 2] >> (16 * (lane % 2))) & 0xFFFF  # [SPAN]
        if left >= SPAN * LANES:
            # A full tile goes without a mask, which would forbid vector loads.
            x = tl.load(x_ptr + lane * SPAN + offs)  # [SPAN]
            tl.store(out_ptr + lane * SPAN + offs, round_to_bf16(x, r))
        else:
            mask = lane * SPAN + offs < left
            x = tl.load(x_ptr + lane * SPAN + offs, mask=mask, other=0.0)  # [SPAN]
            tl.store(out_ptr + lane * SPAN + offs, round_to_bf16(x, r), mask=mask)


def round_stochastically(x: Tensor, *, seed: int, step: int, stream: int = 0, out: Tensor | None = None) -> Tensor:
    """bf16 of the shape of `x`, contiguous fp32: each element one of its two bf16 neighbours, right on average.

    `seed` is in [0, 2**64), `step` and `stream` in [0, 2**32): the same three give the same bits, and a parameter takes
    its number as `stream` so that no two share their draws. `out` is written instead of fresh memory. Raises ValueError
    for another dtype, layout, device or range.
    """
    _check(x, out)
    check_key(seed=seed, step=step, stream=stream)
    if out is None:
        out = torch.empty_like(x, dtype=torch.bfloat16)
    if not x.numel():
        return out
    if not uses_triton(x):
        return out.copy_(round_stochastically_reference(x, seed=seed, step=step, stream=stream))
    chosen = cards.constants("stochastic_rounding", cards.ALL, x.device, WARPS=WARPS)
    with on_device(x):
        _round_kernel[(-(-x.numel() // (SPAN * LANES)),)](
            x,
            out,
            x.numel(), *signed_words(seed), signed_words(step)[0], signed_words(stream)[0],
            SPAN=SPAN, LANES=LANES,
            num_warps=chosen["WARPS"],
        )  # fmt: skip
    return out


def check_key(*, seed: int = 0, step: int = 0, stream: int = 0) -> None:
    """ValueError for a number that the draws cannot be a function of, by name."""
    for name, value, width in (("seed", seed, 64), ("step", step, 32), ("stream", stream, 32)):
        if not 0 <= value < 2**width:
            raise ValueError(f"{name} must be in [0, 2**{width}), got {value}")


def _check(x: Tensor, out: Tensor | None) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous torch.float32, got {tuple(x.shape)} with strides {x.stride()} of {x.dtype}"
        )
    if out is not None:
        good = out.dtype == torch.bfloat16 and out.shape == x.shape and out.device == x.device
        if not good or not out.is_contiguous():
            raise ValueError(
                f"out must be contiguous torch.bfloat16 {tuple(x.shape)} on {x.device}, got {tuple(out.shape)} with "
                f"strides {out.stride()} of {out.dtype} on {out.device}"
            )


def signed_words(value: int) -> tuple[int, int]:
    """Low and high 32 bits, each as an int32, so that no value changes the type that a kernel is compiled for."""
    low, high = (((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for word in (value, value >> 32))
    return low, high


def philox_reference(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 by torch: int64 tensors of one shape and two numbers, all in [0, 2**32), and so are the results."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _product(PHILOX_M[0], c0), _product(PHILOX_M[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_W[0]) & 0xFFFFFFFF, (k1 + PHILOX_W[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of `factor * x`, without a number that int64 cannot hold."""
    above, below = factor * (x >> 16), factor * (x & 0xFFFF)
    return (above + (below >> 16)) >> 16, (((above & 0xFFFF) << 16) + below) & 0xFFFFFFFF


def _words_reference(c: Tensor, seed: int, step: int, stream: int) -> list[Tensor]:
    counter = (c & 0xFFFFFFFF, c >> 32, torch.full_like(c, step), torch.full_like(c, stream))
    return philox_reference(counter, (seed & 0xFFFFFFFF, seed >> 32))


def draws_reference(first_tile: int, tiles: int, *, seed: int, step: int, stream: int, device: torch.device) -> Tensor:
    """int64 `[8192 * tiles]` in [0, 65536): the draws of the elements from `8192 * first_tile` on."""
    c = torch.arange(first_tile * SPAN, (first_tile + tiles) * SPAN, dtype=torch.int64, device=device)
    words = _words_reference(c, seed, step, stream)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]  # each [tiles * SPAN]
    return torch.stack([half.view(tiles, SPAN) for half in halves], dim=1).view(-1)


def draws_at_reference(place: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """int64 `[n]` in [0, 65536): the draws of the elements `place`, int64 `[n]`."""
    words = _words_reference(place // (SPAN * LANES) * SPAN + place % SPAN, seed, step, stream)
    lane = place // SPAN % LANES
    word = torch.stack(words).gather(0, (lane // 2)[None])[0]
    return (word >> 16 * (lane % 2)) & 0xFFFF


def _rounded(x: Tensor, r: Tensor) -> Tensor:
    """bf16 of fp32 `x` with the draws `r`, int64 of the same shape."""
    bits = x.view(torch.int32).long()
    magnitude = bits & MAGNITUDE_BITS
    rounded = (magnitude + r).clamp(max=LARGEST_BITS)
    kept = torch.where(magnitude > INF_BITS, magnitude | QUIET_BIT, magnitude)
    chosen = torch.where(magnitude < INF_BITS, rounded, kept) >> 16
    chosen = torch.where(bits < 0, chosen - 0x8000, chosen)
    return chosen.to(torch.int16).view(torch.bfloat16)


def round_at_reference(x: Tensor, place: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """bf16 of the shape of `x`, contiguous fp32, whose elements have the numbers `place`, int64 of that shape: what
    `round_stochastically` of a tensor gives that holds them in these places."""
    out = torch.empty_like(x, dtype=torch.bfloat16)
    size = CHUNK_TILES * SPAN if x.device.type == "cpu" else max(1, x.numel())
    for part, numbers, piece in zip(*(t.view(-1).split(size) for t in (x, place.contiguous(), out)), strict=True):
        piece.copy_(_rounded(part, draws_at_reference(numbers, seed=seed, step=step, stream=stream)))
    return out


def round_stochastically_reference(x: Tensor, *, seed: int, step: int, stream: int = 0) -> Tensor:
    """The same rounding by torch, on any device."""
    flat, size = x.reshape(-1), SPAN * LANES
    out = torch.empty_like(flat, dtype=torch.bfloat16)
    step_tiles = CHUNK_TILES if x.device.type == "cpu" else GPU_CHUNK_TILES
    for first in range(0, -(-flat.numel() // size), step_tiles):
        piece = flat[first * size : (first + step_tiles) * size]
        tiles = -(-piece.numel() // size)
        r = draws_reference(first, tiles, seed=seed, step=step, stream=stream, device=x.device)
        out[first * size :][: piece.numel()] = _rounded(piece, r[: piece.numel()])
    return out.view(x.shape)
