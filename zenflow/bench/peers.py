"""The contestants of other projects, imported only in the child that runs them: zenflow-train's engines, timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zenflow.bench.ours import OnDevice
from zenflow.bench.registry import DEFAULT_U, Job
from zenflow.training import peers
from zenflow.training.schema import OptimizerConfig


class TorchAO(OnDevice):
    """CPUOffloadOptimizer. It takes the gradients during backward, so a global norm cannot clip them."""

    def _build(self, model: nn.Module, job: Job) -> peers.TorchAO:
        return peers.TorchAO(model, job.trainer, lr=job.lr, weight_decay=0.01)


class DeepSpeed(OnDevice):
    """ZeRO-2 with the optimizer on the CPU; for the trainer `deepspeed-zenflow` with its own `zenflow` block."""

    def _build(self, model: nn.Module, job: Job) -> peers.DeepSpeed:
        return peers.DeepSpeed(model, job.trainer, deepspeed_config(job))

    def step(self, tokens: Tensor) -> Tensor:
        loss = self._optimizer.wrapped(self.model)(input_ids=tokens, labels=tokens).loss
        self._optimizer.backward(loss)
        self._optimizer.step()
        return loss.detach()


def deepspeed_config(job: Job) -> dict[str, Any]:
    """DeepSpeed's JSON for this job, in bf16. The selection interval lies beyond the run, in whole windows."""
    zenflow = {
        "topk_ratio": 0.1,
        "select_interval": DEFAULT_U * (job.warm_up + job.steps + 1),
        "update_interval": DEFAULT_U,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    optimizer = OptimizerConfig(lr=job.lr, weight_decay=0.01, max_grad_norm=job.clip)
    block = zenflow if job.trainer == "deepspeed-zenflow" else None
    sizes = {"train_batch_size": job.batch, "train_micro_batch_size_per_gpu": job.batch}
    return peers.deepspeed_config(optimizer, torch.bfloat16, block) | sizes
