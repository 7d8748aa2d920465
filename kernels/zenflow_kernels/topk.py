"""Choose the n channels with the highest scores.

Scores are ordered by an integer key: the bits of an fp32 number, with those of negative numbers reversed, order as the
numbers do; every non-finite score gets the lowest key of all. The nth highest key is found digit by digit, 8 bits each,
from histograms of the keys that begin as it does. Every key above it is chosen, and of those equal to it the ones with
the lowest index: one pass in index order writes the result, ascending and free of ties. One program makes one choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow_kernels import cards
from zenflow_kernels.channels import integers_on
from zenflow_kernels.dispatch import on_device, tl, triton, uses_triton

BLOCK = 4096  # scores read at once; twice as many take a second longer to compile
WARPS = 16
N_FIELDS = tl.constexpr(4)  # of a choice, int64: address of its scores, their number, n, first place of the result


@triton.jit
def _keys(scores_ptr, offs, channels):
    """int64 in [0, 2**32), ordered as the scores; 0 where non-finite, -1 beyond the end."""
    score = tl.load(scores_ptr + offs, mask=offs < channels, other=0.0) + 0.0  # -0.0 becomes 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    ordered = tl.where((bits & 0x7F800000) == 0x7F800000, 0, ordered)
    return tl.where(offs < channels, ordered, -1)


@triton.jit
def _select_kernel(
    fields_ptr,
    index_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    fields_ptr += tl.program_id(0) * N_FIELDS
    scores_ptr = tl.load(fields_ptr).to(tl.pointer_type(tl.float32))
    channels, wanted = tl.load(fields_ptr + 1).to(tl.int32), tl.load(fields_ptr + 2).to(tl.int32)
    index_ptr += tl.load(fields_ptr + 3)
    threshold = tl.full((), 0, tl.int64)
    for step in range(0, 4):
        shift = tl.full((), 24, tl.int64) - 8 * step
        counts = tl.zeros([256], dtype=tl.int32)
        for offset in range(0, channels, BLOCK):
            keys = _keys(scores_ptr, offset + tl.arange(0, BLOCK), channels)
            begins_so = (keys >= 0) & ((keys >> (shift + 8)) == threshold)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=begins_so)
        reached = tl.cumsum(counts, axis=0, reverse=True)  # keys with this digit or a higher one
        digit = tl.sum((reached >= wanted).to(tl.int32), axis=0) - 1
        wanted -= tl.sum(tl.where(tl.arange(0, 256) == digit, reached - counts, 0), axis=0)
        threshold = threshold * 256 + digit

    equals_before = tl.full((), 0, tl.int32)
    chosen_before = tl.full((), 0, tl.int32)
    for offset in range(0, channels, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        keys = _keys(scores_ptr, offs, channels)  # [BLOCK]
        equal = (keys == threshold).to(tl.int32)
        rank = equals_before + tl.cumsum(equal, axis=0) - equal
        chosen = ((keys > threshold) | ((equal != 0) & (rank < wanted))).to(tl.int32)
        place = chosen_before + tl.cumsum(chosen, axis=0) - chosen
        tl.store(index_ptr + place, offs.to(tl.int64), mask=chosen != 0)
        equals_before += tl.sum(equal, axis=0)
        chosen_before += tl.sum(chosen, axis=0)


def select_channels(scores: Tensor, n: int) -> Tensor:
    """int64 `[n]`, ascending: the indices of the `n` highest of `scores`, fp32 `[channels]`.

    Ties go to the lower index. A non-finite score never wins over a finite one; if fewer than `n` are finite, the
    non-finite with the lowest indices fill up. `n = 0` launches nothing. Raises ValueError unless 0 <= n <= channels.
    """
    return grouped_choices([scores], [n])[0]


def grouped_choices(scores: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """`select_channels` of each of `scores`, all on one device, with its number of `counts`, in one launch.

    int64 `[n]` for each. Raises ValueError unless scores are contiguous fp32 `[channels]` and 0 <= n <= channels.
    """
    for score, n in zip(scores, counts, strict=True):
        if score.dtype != torch.float32 or score.dim() != 1 or not score.is_contiguous():
            raise ValueError(
                f"scores must be contiguous torch.float32 [channels], got {tuple(score.shape)} of {score.dtype}"
            )
        if not 0 <= n <= score.numel():
            raise ValueError(f"n must be in [0, {score.numel()}], got {n}")
    if not sum(counts):
        return [torch.empty(0, dtype=torch.int64, device=score.device) for score in scores]
    if not uses_triton(scores[0]):
        return [select_channels_reference(score, n) for score, n in zip(scores, counts, strict=True)]
    rows, first = [], 0
    for score, n in zip(scores, counts, strict=True):
        if n:
            rows += [score.data_ptr(), score.numel(), n, first]
            first += n
    index = torch.empty(first, dtype=torch.int64, device=scores[0].device)
    chosen = cards.constants("select_channels", cards.ALL, index.device, BLOCK=BLOCK, WARPS=WARPS)
    with on_device(scores[0]):
        _select_kernel[(sum(n > 0 for n in counts),)](
            integers_on(index.device, rows),
            index,
            BLOCK=chosen["BLOCK"],
            num_warps=chosen["WARPS"],
        )  # fmt: skip
    return list(index.split(list(counts)))


def select_channels_reference(scores: Tensor, n: int) -> Tensor:
    """The same choice by a stable sort."""
    order = torch.where(torch.isfinite(scores), scores, float("-inf"))
    return order.sort(descending=True, stable=True).indices[:n].sort().values
