"""How much of the gradient lies in each channel.

    square      score[i] = sum over channel i of f32(x)**2
    magnitude   score[i] = sum over channel i of |f32(x)|

Two stages in a fixed order, without atomics: every program sums a block of channels over a run of their elements, then
the runs of each channel are added in their order. fp32 throughout; a channel whose sum overflows, or that holds an inf
or NaN, scores non-finite, which `select_channels` never prefers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.channels import channel_axis, check_matrix
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, uses_triton

IMPORTANCES = ("square", "magnitude")
RUN = 512  # elements of a channel that one program sums
# Elements of a channel x channels, read at once; the second pair where the elements of a channel are neighbours.
COLUMN_BLOCK, ROW_BLOCK = (16, 256), (256, 16)
SUM_BLOCK = 256  # channels whose runs one program adds


@triton.jit(do_not_specialize=["n_channel_blocks"])
def _runs_kernel(
    x_ptr,
    runs_ptr,
    length, channels, stride_length, stride_channel, n_channel_blocks,
    SQUARE: tl.constexpr, RUN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    run = program // n_channel_blocks
    c = (program - run * n_channel_blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_L, BLOCK_C], dtype=tl.float32)
    for offset in range(0, RUN, BLOCK_L):
        i = run.to(tl.int64) * RUN + offset + tl.arange(0, BLOCK_L)
        mask = (i < length)[:, None] & (c < channels)[None, :]
        offs = i[:, None] * stride_length + c[None, :] * stride_channel
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_L, BLOCK_C]
        sums += x * x if SQUARE else tl.abs(x)
    tl.store(runs_ptr + run.to(tl.int64) * channels + c, tl.sum(sums, axis=0), mask=c < channels)


@triton.jit(do_not_specialize=["n_runs"])
def _add_runs_kernel(
    runs_ptr,
    scores_ptr,
    n_runs, channels,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for _ in range(0, n_runs):
        total += tl.load(runs_ptr + c, mask=c < channels, other=0.0)  # [BLOCK_C]
        runs_ptr += channels
    tl.store(scores_ptr + c, total, mask=c < channels)


def channel_scores(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """fp32 `[channels]`: the score of each column or row (`channel_dim`) of `x`, `[rows, cols]` of fp32, bf16 or fp16.

    `x` is contiguous; `importance` is "square" or "magnitude". Raises ValueError for anything else.
    """
    axis = channel_axis(channel_dim)
    if importance not in IMPORTANCES:
        raise ValueError(f"importance must be one of {IMPORTANCES}, got {importance!r}")
    check_matrix("x", x)
    if x.numel() == 0:
        return x.new_zeros(x.shape[axis], dtype=torch.float32)
    if not uses_triton(x):
        return channel_scores_reference(x, channel_dim, importance)
    with on_device(x):
        return _launch_scores(x, channel_dim, importance)


def _launch_scores(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    axis = channel_axis(channel_dim)
    block_l, block_c = COLUMN_BLOCK if channel_dim == "column" else ROW_BLOCK
    length, channels = x.shape[1 - axis], x.shape[axis]
    n_runs, channel_blocks = -(-length // RUN), -(-channels // block_c)
    runs = x.new_empty((n_runs, channels), dtype=torch.float32)
    _runs_kernel[(n_runs * channel_blocks,)](
        x,
        runs,
        length, channels, x.stride(1 - axis), x.stride(axis), channel_blocks,
        SQUARE=importance == "square", RUN=RUN, BLOCK_L=block_l, BLOCK_C=block_c,
        **EXACT,
    )  # fmt: skip
    if n_runs == 1:
        return runs[0]
    scores = x.new_empty(channels, dtype=torch.float32)
    _add_runs_kernel[(-(-channels // SUM_BLOCK),)](
        runs,
        scores,
        n_runs, channels,
        BLOCK_C=SUM_BLOCK,
        **EXACT,
    )  # fmt: skip
    return scores


def channel_scores_reference(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """The same scores by torch: runs of `RUN` elements, then their sum; the order inside a run is torch's."""
    values = x.float()
    values = values * values if importance == "square" else values.abs()
    along = 1 - channel_axis(channel_dim)
    return torch.stack([run.sum(along) for run in values.split(RUN, along)]).sum(0)
