"""The training loop: steps without epochs, evaluation in between, one engine that owns the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from zenflow.terminal import is_watched
from zenflow.training.checkpoints import Keeper
from zenflow.training.data import Batch, Dataset, Order, evaluation_batches
from zenflow.training.engines import Engine
from zenflow.training.metrics import Evaluation, Recorder, StepTimer
from zenflow.training.schema import OptimizerConfig, Schedule, TrainConfig
from zenflow.training.scores import SCORES

log = logging.getLogger(__name__)
LOG_LINES = 10  # in a run, where there is no terminal to draw a bar on


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step `step` of 1..`steps`: a linear warm-up that reaches `lr` at its last step, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)  # 1 at the last step
    if config.schedule is Schedule.constant:
        return config.lr
    left = 1 - done if config.schedule is Schedule.linear else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


class Loop:
    """One run's steps. `model` and `engine` are on one device; the order of the samples follows from the seed.

    The steps from `trace_steps[0]` to `trace_steps[1]` are recorded in the file `trace`, if there is one. `start` steps
    have been made before. A `keeper` hears of every step's end, and may end the run there by raising Stopped.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        data: Dataset,
        engine: Engine,
        recorder: Recorder,
        timer: StepTimer,
        trace: Path | None = None,
        keeper: Keeper | None = None,
        start: int = 0,
    ) -> None:
        self._config, self._model, self._data, self._trace = config, engine.wrapped(model), data, trace
        self._engine, self._recorder, self._timer = engine, recorder, timer
        self._keeper, self._start = keeper, start
        self._device = next(model.parameters()).device
        self._order = Order(len(data.train), config.seed)
        self._next_line = start + 1  # the step from which the next log line is due

    def run(self) -> None:
        """All steps, with an evaluation before the first, after the last, and every `evaluate_every`."""
        steps, start = self._config.steps, self._start
        if self._evaluates_after(start) and not self._is_evaluated(start):
            self._evaluate(start)
        self._step_ended(start)
        first, last = self._config.trace_steps if self._trace is not None else (0, 0)
        with _progress(steps, start) as bar, ExitStack() as tracing:
            for number in range(start + 1, steps + 1):
                if number == first:
                    tracing.enter_context(self._engine.trace(self._trace))
                self._step(number)
                if number == last:
                    self._write_trace(tracing)
                self._report_progress(bar, number)
                if self._evaluates_after(number):
                    self._evaluate(number)
                self._step_ended(number)
        self._engine.flush()
        if not self._evaluate(steps):
            self._step_ended(steps)

    def _write_trace(self, tracing: ExitStack) -> None:
        """One that cannot be written costs no training."""
        try:
            tracing.close()
        except OSError as error:
            log.error("no trace: %s", error)

    def _evaluates_after(self, step: int) -> bool:
        every = self._config.evaluate_every
        return step < self._config.steps and (step == 0 or (every is not None and step % every == 0))

    def _is_evaluated(self, step: int) -> bool:
        return step > 0 and any(point.step == step for point in self._recorder.history.evaluations)

    def _step_ended(self, step: int) -> None:
        if self._keeper is not None:
            self._keeper.step_ended(step)

    def _step(self, number: int) -> None:
        """`accumulate` backward passes, for example ids [32, 64] -> logits [32, 2] -> loss [], and one update.

        The loss is the mean over all labels of the step, whichever micro batch they are in, as of one big batch.
        """
        config = self._config
        lr = learning_rate(config.optimizer, number, config.steps)
        for group in self._engine.param_groups:
            group["lr"] = lr
        self._timer.start()
        loss, tokens = torch.zeros((), device=self._device), 0
        batches = [self._train_batch((number - 1) * config.accumulate + micro) for micro in range(config.accumulate)]
        targets = sum(batch.targets for batch in batches)
        for batch in batches:
            part = self._loss(self._forward(batch), batch) * (batch.targets / targets)
            self._engine.backward(part)
            loss += part.detach()
            tokens += batch.tokens
        self._engine.step()
        self._engine.zero_grad()
        self._timer.stop()
        self._recorder.step(number, loss, lr, tokens, last=number == config.steps)

    def _train_batch(self, micro: int) -> Batch:
        size = self._config.batch_size
        return self._data.train.batch(self._order.take(micro * size, size)).to(self._device)

    def _forward(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.autocast):
            return self._model(*batch.inputs)

    def _loss(self, logits: Tensor, batch: Batch, reduction: str = "mean") -> Tensor:
        if batch.labels.is_floating_point():
            return functional.mse_loss(logits.squeeze(-1).float(), batch.labels, reduction=reduction)
        # Labels of -100 (`data.IGNORED`) count for nothing, which is cross_entropy's default.
        return functional.cross_entropy(logits.flatten(0, -2).float(), batch.labels.flatten(), reduction=reduction)

    @torch.no_grad()
    def _evaluate(self, step: int) -> bool:
        """Held-out loss and scores of the weights as they are; nothing about the training changes by it.

        False if it was given up because the run is to end.
        """
        config, data = self._config, self._data
        loss, count = torch.zeros((), dtype=torch.float64, device=self._device), 0
        answers: list[tuple[Tensor, Tensor]] = []  # a batch's predictions and labels
        self._model.eval()
        for batch in evaluation_batches(data.held_out, config.data.evaluate_samples, config.batch_size):
            if self._keeper is not None and self._keeper.stopping:
                self._model.train()
                return False
            batch = batch.to(self._device)
            logits = self._forward(batch)
            loss += self._loss(logits, batch, reduction="sum")
            count += batch.targets
            if data.classes is not None:
                answers.append((logits.squeeze(-1) if data.classes == 1 else logits.argmax(dim=-1), batch.labels))
        self._model.train()
        scores: dict[str, float] = {}
        if answers:
            predicted, true = (torch.cat(part).cpu() for part in zip(*answers, strict=True))
            scores = {name: SCORES[name](predicted, true) for name in data.scores}
        self._recorder.evaluation(Evaluation(step, loss.item() / count, scores.pop("accuracy", None), scores))
        return True

    def _report_progress(self, bar: tqdm, number: int) -> None:
        steps, history = self._config.steps, self._recorder.history
        if len(history.losses) == number:  # else the loss is still on the device
            bar.set_postfix(loss=f"{history.losses[-1]:.4f}", refresh=False)
            if bar.disable and number >= self._next_line:
                self._next_line = number + -(-steps // LOG_LINES)
                log.info("step %d of %d: loss %.4f, %.3f s", number, steps, history.losses[-1], history.seconds[-1])
        bar.update()


@contextmanager
def _progress(steps: int, start: int) -> Iterator[tqdm]:
    with logging_redirect_tqdm(), tqdm(total=steps, initial=start, unit="step", disable=not is_watched()) as bar:
        yield bar
