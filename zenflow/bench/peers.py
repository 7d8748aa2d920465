"""The contestants of other projects, imported only in the child that runs them."""

from __future__ import annotations

import os
import socket

import torch
from torch import Tensor, nn

from zenflow.bench.ours import Floor, backward
from zenflow.bench.registry import DEFAULT_U, Job


class TorchAO(Floor):
    """CPUOffloadOptimizer. It takes the gradients during backward, so a global norm cannot clip them."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(model, job)
        self._optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, lr=job.lr, weight_decay=0.01
        )

    def step(self, tokens: Tensor) -> Tensor:
        loss = backward(self.model, tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


class DeepSpeed(Floor):
    """ZeRO-2 with the optimizer on the CPU; for the trainer `deepspeed-zenflow` with its own `zenflow` block."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
        import deepspeed

        super().__init__(model, job)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(job)
        )

    def step(self, tokens: Tensor) -> Tensor:
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


def deepspeed_config(job: Job) -> dict:
    """DeepSpeed's JSON for this job. The selection interval lies beyond the run, in whole windows."""
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if job.trainer == "deepspeed-zenflow":
        zero["zenflow"] = {
            "topk_ratio": 0.1,
            "select_strategy": "step",
            "select_interval": DEFAULT_U * (job.warm_up + job.steps + 1),
            "update_interval": DEFAULT_U,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        }
    adamw = {"lr": job.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    return {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": adamw},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
