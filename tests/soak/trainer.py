"""A trainer under fault injection, in a process of its own: it is struck, notices, and goes on from its last state.

It tells the driver what happens, one tuple a message: ("reference", digest), ("step", n), ("saved", n, bytes),
("struck", index), ("noticed", index, seconds or None), ("refused", index), ("wrong", text), ("end", digest, leaks).
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import random
import time
from collections.abc import Callable, Container
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from tests.engine.driving import INTEGERS
from tests.engine.resuming import swap_weights
from tests.processes import shared_bytes
from tests.soak.faults import Striker, bad_start, can_strike, is_named
from tests.soak.scenario import AT_START, FROM_OUTSIDE, LETHAL, Fault, Scenario
from zenflow import WorkerError, ZenFlow

Tell = Callable[..., None]


def digest(parameters: list[nn.Parameter]) -> str:
    """Of every bit of every weight."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(
            parameter.detach().contiguous().view(-1).view(INTEGERS[parameter.element_size()]).numpy().tobytes()
        )
    return found.hexdigest()


def accumulate(parameters: list[nn.Parameter], grads: list[Tensor], share: float, absent: Container[int]) -> None:
    """Add that share of these gradients to `.grad`, by a backward pass that hooks can see."""
    present = [pair for index, pair in enumerate(zip(parameters, grads, strict=True)) if index not in absent]
    parts = [(parameter * (share * grad)).float().sum() for parameter, grad in present]
    torch.stack(parts).sum().backward()


def held() -> tuple[int, int]:
    """Open descriptors, and bytes of shared memory, of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), shared_bytes()


class Trainer:
    """One life of a trainer: from the start, or from `saved`, with the faults that have not struck yet."""

    def __init__(self, scenario: Scenario, struck: set[int], tell: Tell) -> None:
        self.scenario, self.tell, self.struck = scenario, tell, set(struck)
        self.gradients = scenario.gradients()
        self.parameters: list[nn.Parameter] = []
        self.engine: ZenFlow | None = None
        self.saved: tuple[int, bytes] = 0, b""
        self.outstanding: Fault | None = None  # has struck and must be noticed

    def undisturbed(self) -> str:
        """The digest of the weights where nothing happens."""
        self._build()
        for step in range(self.scenario.steps):
            self._train(step)
        return self._finish()

    def run(self, saved: tuple[int, bytes]) -> str:
        """Train to the end, from `saved` on, whatever strikes; the digest of the weights."""
        self.saved = saved
        while True:
            self._start()
            striker = Striker(self.engine)
            try:
                self._train_on(striker)
                return self._finish()
            except WorkerError as error:
                striker.end()
                self._notice(striker, error)
            finally:
                striker.end()
                self._close()

    def _train_on(self, striker: Striker) -> None:
        for step in range(self.saved[0], self.scenario.steps):
            self._strike(striker, step)
            self._train(step)
            self.tell("step", step + 1)
            if self.outstanding is None:
                striker.end()
            if (step + 1) % self.scenario.save_every == 0:
                self._save(step + 1)
        self.engine.flush()
        if self.outstanding is not None:
            striker.end()
            self.engine.flush()  # what struck in the last step
            self.tell("wrong", f"{self.outstanding} was not noticed")

    def _train(self, step: int) -> None:
        moment = self.scenario.history[step]
        for group, rate in zip(self.engine.param_groups, moment.rates, strict=False):
            group["lr"] *= rate
        for index in moment.thawed:
            self.parameters[index].requires_grad_()
        if moment.swap:
            swap_weights(self.engine, self.parameters)
        if moment.flush:
            self.engine.flush()
        for _ in range(self.scenario.passes):
            accumulate(self.parameters, self.gradients[step], 1 / self.scenario.passes, moment.absent)
        self.engine.grad_scale = None if moment.scale is None else torch.tensor([moment.scale])
        self.engine.step()
        self.engine.grad_scale = None
        self.engine.zero_grad()

    def _strike(self, striker: Striker, step: int) -> None:
        """The next fault that is due, if none is still to be noticed: one a step, they must not undo each other."""
        for fault in self.scenario.faults:
            outside = fault.kind in FROM_OUTSIDE + AT_START
            if fault.step > step or fault.index in self.struck or outside or self.outstanding is not None:
                continue
            self.struck.add(fault.index)
            if not can_strike(self.engine):
                continue
            self.tell("struck", fault.index)
            if fault.kind in LETHAL:
                self.outstanding = fault
            striker.strike(fault.kind, random.Random(fault.draw))
            return

    def _notice(self, striker: Striker, error: WorkerError) -> None:
        fault, self.outstanding = self.outstanding, None
        if fault is None or not is_named(fault.kind, error):
            self.tell("wrong", f"{fault} was noticed as {error}")
            return
        seconds = None if striker.struck is None else time.monotonic() - striker.struck
        self.tell("noticed", fault.index, seconds)

    def _save(self, step: int) -> None:
        file = io.BytesIO()
        torch.save(self.engine.state_dict(), file)
        self.saved = step, file.getvalue()
        self.tell("saved", *self.saved)

    # Building and ending

    def _start(self) -> None:
        """An optimizer on the last state, after the bad starts that come first."""
        for fault in self.scenario.faults:
            if fault.kind in AT_START and fault.index not in self.struck:
                self.struck.add(fault.index)
                self._start_short(fault)
        self._build()

    def _start_short(self, fault: Fault) -> None:
        before = held()
        self.tell("struck", fault.index)
        refused = None
        try:
            with bad_start(fault.kind, random.Random(fault.draw)):
                self._build()
            if fault.kind == "kill at start" and self.engine.stats().worker_pid is not None:
                self.engine.flush()
        except (OSError, MemoryError, WorkerError) as error:
            refused = error.with_traceback(None)
        self._close()
        self.parameters = []
        if refused is None and fault.kind == "kill at start" and self.scenario.defers:
            self.tell("wrong", f"{fault} was not noticed")
        elif refused is not None and is_named(fault.kind, refused):
            self.tell("refused", fault.index)
        elif refused is not None:
            self.tell("wrong", f"{fault} was refused as {refused!r}")
        refused = None
        if held()[0] > before[0]:
            self.tell("wrong", f"{fault} left {held()[0] - before[0]} descriptors open")

    def _build(self) -> None:
        step, saved = self.saved
        state = torch.load(io.BytesIO(saved), weights_only=True) if saved else {"state": {}}
        self.parameters = self.scenario.parameters(step, known=state["state"])
        self.engine = ZenFlow(self.scenario.param_groups(self.parameters), **self.scenario.settings_from(step))
        if saved:
            self.engine.load_state_dict(state)

    def _finish(self) -> str:
        self.engine.flush()
        result = digest(self.parameters)
        self._close()
        return result

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close(flush=False)
        self.engine = None


def jumping(draw: random.Random) -> Callable[[], float]:
    """A wall clock that is set forwards and backwards by anybody at any time."""
    now = time.time
    return lambda: now() + draw.uniform(-1e6, 1e6)


def life(connection: Connection, scenario: Scenario, struck: set[int], saved: tuple[int, bytes], first: bool) -> None:
    """What the process does; ends with a message of its own unless it is killed. first: nobody knows the right end."""
    time.time = jumping(random.Random(scenario.seed))

    def tell(*message: object) -> None:
        connection.send(message)

    try:
        if first:
            tell("reference", Trainer(scenario, struck, lambda *message: None).undisturbed())
        before = held()
        result = Trainer(scenario, struck, tell).run(saved)
        after = held()
        tell("end", result, (max(0, after[0] - before[0]), max(0, after[1] - before[1])))
    except KeyboardInterrupt:
        pass  # the driver's; what it has to see is that the process ends
    except BaseException as error:
        tell("wrong", f"{type(error).__name__}: {error}")
        raise
