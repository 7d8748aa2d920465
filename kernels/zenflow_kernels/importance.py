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

from zenflow_kernels.dispatch import EXACT, FLOAT_DTYPES, on_device, tl, triton, uses_triton

MEASURES = ("square", "magnitude")
RUN = 512  # elements of a channel that one program sums
# Elements of a channel x channels, read at once; the second pair where the elements of a channel are neighbours.
COLUMN_BLOCK, ROW_BLOCK = (16, 256), (256, 16)


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


def channel_scores(x: Tensor, dim: str, measure: str) -> Tensor:
    """fp32 `[channels]`: the score of each column or row (`dim`) of `x`, `[rows, cols]` of fp32, bf16 or fp16.

    `x` is contiguous; `measure` is "square" or "magnitude". Raises ValueError for anything else.
    """
    if dim not in ("column", "row"):
        raise ValueError(f'dim must be "column" or "row", got {dim!r}')
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {MEASURES}, got {measure!r}")
    if x.dim() != 2 or x.dtype not in FLOAT_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous [rows, cols] of {FLOAT_DTYPES}, got {tuple(x.shape)} with strides {x.stride()} of "
            f"{x.dtype}"
        )
    if x.numel() == 0:
        return x.new_zeros(x.shape[1 if dim == "column" else 0], dtype=torch.float32)
    if not uses_triton(x):
        return channel_scores_reference(x, dim, measure)
    with on_device(x):
        return _launch_scores(x, dim, measure)


def _launch_scores(x: Tensor, dim: str, measure: str) -> Tensor:
    axis, (block_l, block_c) = (0, COLUMN_BLOCK) if dim == "column" else (1, ROW_BLOCK)
    length, channels = x.shape[axis], x.shape[1 - axis]
    n_runs, channel_blocks = -(-length // RUN), -(-channels // block_c)
    runs = x.new_empty((n_runs, channels), dtype=torch.float32)
    _runs_kernel[(n_runs * channel_blocks,)](
        x,
        runs,
        length, channels, x.stride(axis), x.stride(1 - axis), channel_blocks,
        SQUARE=measure == "square", RUN=RUN, BLOCK_L=block_l, BLOCK_C=block_c,
        **EXACT,
    )  # fmt: skip
    if n_runs == 1:
        return runs[0]
    scores = x.new_empty(channels, dtype=torch.float32)
    _add_runs_kernel[(-(-channels // 256),)](
        runs,
        scores,
        n_runs, channels,
        BLOCK_C=256,
        **EXACT,
    )  # fmt: skip
    return scores


def channel_scores_reference(x: Tensor, dim: str, measure: str) -> Tensor:
    """The same scores by torch: runs of `RUN` elements, then their sum; the order inside a run is torch's."""
    values = x.float()
    values = values * values if measure == "square" else values.abs()
    axis = 0 if dim == "column" else 1
    return torch.stack([run.sum(axis) for run in values.split(RUN, axis)]).sum(0)
