"""Other projects' offloads with their own packages, where these are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.commands import BRIEF, ENVIRONMENT, Outcome
from zenflow.report.runs import find, read
from zenflow.report.study import studies
from zenflow.training.engines import build_engine
from zenflow.training.schema import OptimizerConfig, Peer, PeerEngine

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
# zenflow-train, and whether it leaves its process as it found it.
ALONE = """
import json, multiprocessing, os, sys
def state():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    children = [child.name for child in multiprocessing.active_children() if child.name.startswith("Spawn")]
    return [sorted(os.sched_getaffinity(0)), [os.environ.get(name) for name in names], children]
before = state()
from experiments.train import main
main()
print(json.dumps([before, state()]))
"""


def alone(*words: str, folder: Path) -> Outcome:
    """zenflow-train in a process of its own, which is as it was when that ends."""
    where = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words, *where],
        cwd=folder.parent,
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    return Outcome(done.returncode, done.stdout, done.stderr, folder)


class Streams:
    """Stands for torch.xpu where there is none: everything is done when it is called."""

    def wait_stream(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> Streams:
        return self


def test_torchao_makes_adamw_s_steps_at_the_rate_of_each_step(monkeypatch):
    """Its own code, on the CPU."""
    module = pytest.importorskip("torchao.optim.cpu_offload")
    here = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("no_grad", "optim")},
        empty_like=lambda like, device=None, pin_memory=False: torch.empty_like(like, device=device),
        xpu=SimpleNamespace(Stream=Streams, current_stream=Streams, stream=lambda stream: nullcontext()),
    )
    monkeypatch.setattr(module, "torch", here)
    monkeypatch.setattr(module, "get_available_devices", lambda: ["cpu", "xpu"])
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(80, 60), nn.Linear(60, 3)) for _ in "ab")
    twin.load_state_dict(model.state_dict())
    settings = OptimizerConfig(lr=1e-3, max_grad_norm=None)
    adamw = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=settings.weight_decay, fused=True)
    with build_engine(model, PeerEngine(Peer.torchao_offload), settings, 1) as engine:
        for step in range(1, 6):
            inputs = torch.randn(7, 80)
            for group in (*engine.param_groups, *adamw.param_groups):
                group["lr"] = 1e-2 / step
            engine.backward(engine.wrapped(model)(inputs).square().mean())
            twin(inputs).square().mean().backward()
            engine.step()
            adamw.step()
            engine.zero_grad()
            adamw.zero_grad()
            assert all(weight.grad is None for weight in model.parameters())
        engine.flush()
        for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(weight, other) and torch.equal(engine.master(weight), weight)


@needs_deepspeed
def test_deepspeed_s_offload_takes_adamw_s_course_and_has_masters(command, tmp_path):
    words = (*BRIEF[:-2], "steps=6", "evaluate_every=3", "optimizer.max_grad_norm=0.5", "model.dtype=bfloat16")
    (tmp_path / "runs").mkdir()
    theirs = alone(*words, "engine=deepspeed_offload", "save_model=true", folder=tmp_path / "runs" / "theirs")
    adamw = command(*words, "engine=adamw", folder=tmp_path / "runs" / "adamw")
    losses = [[line.get("loss", line.get("validation_loss")) for line in run.metrics()] for run in (theirs, adamw)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and losses[0][0] == losses[1][0]
    norms = [[line["grad_norm"] for line in run.metrics() if "grad_norm" in line] for run in (theirs, adamw)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    again = command(*words, "engine=adamw", f"model.path={theirs.folder / 'model'}", folder=tmp_path / "again")
    assert again.summary()["validation_loss_before"] == theirs.summary()["validation_loss_after"]
    weights = torch.load(theirs.folder / "model" / "weights.pt").values()
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)  # masters, not the weights
    (study,) = studies([read(folder) for folder in find([tmp_path / "runs"])], [], {})
    assert [setting.name for setting in study.settings] == ["adamw", "deepspeed_offload"]


@needs_deepspeed
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_deepspeed_s_zenflow_trains_one_run_after_another_and_side_by_side(tmp_path, launcher):
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
        launching = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    else:
        launching = ()
    words = (*BRIEF[:-2], "steps=10", "evaluate_every=null", "engine.select_interval=8", "seed=0,1")
    sweep = alone("-m", *words, "engine=deepspeed_zenflow", *launching, folder=tmp_path / "sweep")
    for job in "01":
        summary = sweep.summary(job)
        assert summary["validation_loss_after"] < summary["validation_loss_before"]
