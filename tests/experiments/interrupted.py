"""Small runs that something happens to in the middle, and what they must have in common with one that went through."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import experiments.train
from tests.commands import Outcome
from zenflow import checkpoint_folder
from zenflow.training.checkpoints import folder_of, step_of
from zenflow.training.loop import Loop
from zenflow.training.tiny import TinyBlock

STEPS = 12
TINY = (
    *("debug=smoke", "threads=1", "plot=false", "evaluate_every=null", f"steps={STEPS}", "batch_size=4"),
    *("model.width=16", "model.layers=1", "model.heads=2", "data.max_length=16", "data.evaluate_samples=8"),
    *("optimizer.schedule=cosine", "optimizer.warmup_steps=3", "optimizer.max_grad_norm=0.5"),
)
ZENFLOW = ("engine.update_interval=4", "engine.select_interval=5", "engine.min_deferred_numel=64")
OUTPUTS = ("summary.json", "summary.txt", "model", "loss.png")


def make_text(path: Path) -> tuple[str, ...]:
    """Text in which an epoch has 6 steps of 4 samples, as the settings that read it."""
    path.write_text("\n".join(f"line {number} of some text, {number * number}" for number in range(18)))
    return ("data=file", f"data.path={path}", "data.held_out=0.1")


def add_dropout() -> Callable[[], None]:
    """Give the tiny model's blocks dropout; what is returned takes it away."""
    forward = TinyBlock.forward
    TinyBlock.forward = lambda self, x: functional.dropout(forward(self, x), 0.2, self.training)

    def remove() -> None:
        TinyBlock.forward = forward

    return remove


def write_late(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """No checkpoint's files are written before step `step` has been made."""
    save, stepping, made = checkpoint_folder.save, Loop._step, threading.Event()

    def late(*arguments: object, **named: object) -> None:
        assert made.wait(60)
        save(*arguments, **named)

    def stepped(loop: Loop, number: int) -> None:
        stepping(loop, number)
        if number == step:
            made.set()

    monkeypatch.setattr(checkpoint_folder, "save", late)
    monkeypatch.setattr(Loop, "_step", stepped)


def signal_after(step: int, number: int) -> None:
    """Send this process a signal within step `step`, when its update has been made and what is being saved is whole."""
    stepping = Loop._step

    def stepped(loop: Loop, at: int) -> None:
        stepping(loop, at)
        if at == step:
            for thread in threading.enumerate():
                if thread.name.startswith("save "):
                    thread.join()
            os.kill(os.getpid(), number)

    Loop._step = stepped


def signal_in_save(step: int, number: int) -> None:
    """Send it when the checkpoint of `step` steps is written, and has no name yet."""
    rename = checkpoint_folder.os.rename

    def renamed(source: Path, target: Path) -> None:
        if step_of(Path(target)) == step:
            os.kill(os.getpid(), number)
        rename(source, target)

    checkpoint_folder.os.rename = renamed


def begun(run: Outcome, folder: Path, step: int) -> Path:
    """A copy of a run as it was after `step` steps, of which the checkpoint was the last that it left."""
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns(*OUTPUTS, "checkpoints"))
    shutil.copytree(folder_of(run.folder, step), folder_of(folder, step))
    return folder


def told(run: Outcome) -> list[tuple[int, float]]:
    """Steps with their losses, evaluations among them."""
    return [(line["step"], line.get("loss", line.get("validation_loss"))) for line in run.metrics()]


def assert_same_run(run: Outcome, other: Outcome) -> None:
    """The same steps, losses and final weights, bit for bit, and the same counts."""
    assert told(run) == told(other)
    weights, other_weights = (
        torch.load(one.folder / "model" / "weights.pt", weights_only=True) for one in (run, other)
    )
    for name, weight in weights.items():
        assert torch.equal(weight.view(torch.int32), other_weights[name].view(torch.int32)), name
    for name in ("steps", "tokens", "windows", "selections", "skipped_steps", "bytes_to_host_per_step"):
        assert run.summary()[name] == other.summary()[name], name


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below, less the log."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"}


def goes_on(command: Callable[..., Outcome], folder: Path, *words: str, place: Path | None = None) -> Outcome:
    """`resume=` with the run's folder, or with `place` in it."""
    return command(f"resume={place or folder}", *words, folder=folder)


if __name__ == "__main__":  # step|save|never STEP SIGNAL, and zenflow-train's words
    when, step, number = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
    add_dropout()
    if when != "never":
        {"step": signal_after, "save": signal_in_save}[when](step, number)
    experiments.train.main()
