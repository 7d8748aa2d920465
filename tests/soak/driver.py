"""The driver: it starts trainers, strikes them from outside, counts what became of every fault, and judges.

Each scenario runs in forked trainers. One that is killed is followed by another, which goes on from the last state that
it had sent. A scenario is well if its final weights equal those of the undisturbed run bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tests.processes import ends_within
from tests.soak.scenario import FROM_OUTSIDE, IN_STREAM, KINDS, LETHAL, Fault, Scenario
from tests.soak.trainer import life

ENDING = {
    "kill trainer": signal.SIGKILL,
    "terminate trainer": signal.SIGTERM,
    "interrupt trainer": signal.SIGINT,
}
SILENCE = 120.0  # seconds without a message: the trainer hangs
ORPHAN = 5.0  # seconds that a worker may outlive its trainer


@dataclass
class Tally:
    """What has happened so far. injected, detected, survived: by kind of fault; notices: seconds, of killed workers."""

    scenarios: int = 0
    steps: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    data_lost: int = 0
    orphans: int = 0
    leaked_descriptors: int = 0
    leaked_bytes: int = 0
    hung: int = 0
    notices: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    trainers: set[int] = field(default_factory=set)  # all that have been

    @property
    def well(self) -> bool:
        """Whether every fault was noticed or survived, and nothing was lost or left behind."""
        left = self.data_lost, self.orphans, self.leaked_descriptors, self.leaked_bytes, self.hung
        noticed = all(self.injected[kind] == self.detected[kind] for kind in LETHAL)
        return not any(left) and not self.wrong and noticed and self.injected == self.survived

    def quantile(self, share: float) -> float | None:
        """Of the seconds until a killed worker was noticed; None if there was none."""
        ordered = sorted(self.notices)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    def figures(self) -> dict[str, object]:
        """For JSON."""
        kinds = [*KINDS, IN_STREAM]
        by_kind = {
            kind: {"injected": self.injected[kind], "detected": self.detected[kind], "survived": self.survived[kind]}
            for kind in kinds
        }
        return {
            "scenarios": self.scenarios,
            "steps": self.steps,
            "injected": sum(self.injected.values()),
            "detected": sum(self.detected.values()),
            "survived": sum(self.survived.values()),
            "data_lost": self.data_lost,
            "orphans": self.orphans,
            "leaked_descriptors": self.leaked_descriptors,
            "leaked_bytes": self.leaked_bytes,
            "hung": self.hung,
            "notice_seconds": {"p50": self.quantile(0.5), "p99": self.quantile(0.99), "count": len(self.notices)},
            "by_kind": by_kind,
            "wrong": self.wrong,
        }

    def table(self) -> str:
        """For people."""
        lines = ["| fault | injected | detected by name | survived |", "|---|---|---|---|"]
        for kind in [*KINDS, IN_STREAM]:
            detected = self.detected[kind] if self.detected[kind] else "-"
            lines.append(f"| {kind} | {self.injected[kind]} | {detected} | {self.survived[kind]} |")
        totals = [sum(counts.values()) for counts in (self.injected, self.detected, self.survived)]
        lines.append(f"| all, in {self.scenarios} scenarios | {totals[0]} | {totals[1]} | {totals[2]} |")
        p50, p99 = (self.quantile(share) for share in (0.5, 0.99))
        lines += [
            "",
            f"data lost {self.data_lost}, orphans {self.orphans}, hung {self.hung}, leaked descriptors "
            f"{self.leaked_descriptors}, leaked bytes {self.leaked_bytes}",
        ]
        if p50 is not None:
            lines.append(
                f"a killed worker is noticed after {1e3 * p50:.1f} ms (p50), {1e3 * p99:.1f} ms (p99, "
                f"{len(self.notices)} kills)"
            )
        return "\n".join(lines)


class Play:
    """One scenario, from its undisturbed run to its last trainer."""

    def __init__(self, scenario: Scenario, tally: Tally) -> None:
        self.scenario, self.tally = scenario, tally
        self.by_index = {fault.index: fault for fault in scenario.faults}
        self.struck: set[int] = set()
        self.outstanding: Fault | None = None  # is to be noticed by the trainer
        self.here: Counter[str] = Counter()  # injected in this scenario
        self.saved: tuple[int, bytes] = 0, b""
        self.reference = self.result = ""
        self.noted: list[str] = []

    def run(self) -> None:
        """Until a trainer has come to the end, or something is wrong."""
        self.tally.scenarios += 1
        while not self.result and not self.noted:
            self._live()
        self._judge()

    def _live(self) -> None:
        mine, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            mine.close()
            _child(theirs, self.scenario, self.struck, self.saved, not self.reference)
        theirs.close()
        try:
            if self._strike_at_start(pid):
                self._drain(mine)
            else:
                self._listen(mine, pid)
        finally:
            os.kill(pid, signal.SIGKILL)  # it has not been waited for, so this is nobody else
            os.waitpid(pid, 0)
            mine.close()
            self.tally.trainers.add(pid)
            self.tally.orphans += count_orphans({pid})

    def _listen(self, connection: Connection, pid: int) -> None:
        while True:
            if not connection.poll(SILENCE):
                self.tally.hung += 1
                self.noted.append(f"no sign of life for {SILENCE:g} s")
                return
            try:
                kind, *content = connection.recv()
            except (EOFError, OSError):
                if not self.result and not self.noted:
                    self.noted.append("the trainer is gone, and nobody has killed it")
                return
            getattr(self, f"_on_{kind}")(*content)
            if self.noted:
                return
            if kind == "step" and self._strike(content[0], pid):
                self._drain(connection)
                return

    def _drain(self, connection: Connection) -> None:
        """What a killed trainer had said."""
        while True:
            try:
                kind, *content = connection.recv()
            except (EOFError, OSError):
                break
            getattr(self, f"_on_{kind}")(*content)
        if self.outstanding is not None:  # it died of something else first
            self._count(self.outstanding.kind, -1)
            self.outstanding = None

    # Messages

    def _count(self, kind: str, more: int = 1) -> None:
        self.tally.injected[kind] += more
        self.here[kind] += more

    def _on_reference(self, found: str) -> None:
        self.reference = found

    def _on_step(self, step: int) -> None:
        self.tally.steps += 1

    def _on_saved(self, step: int, state: bytes) -> None:
        self.saved = step, state

    def _on_struck(self, index: int) -> None:
        fault = self.by_index[index]
        self.struck.add(index)
        self._count(fault.kind)
        if fault.kind in LETHAL:
            self.outstanding = fault

    def _on_noticed(self, index: int, seconds: float | None) -> None:
        self.outstanding = None
        self.tally.detected[self.by_index[index].kind] += 1
        if seconds is not None:
            self.tally.notices.append(seconds)

    def _on_refused(self, index: int) -> None:
        self.tally.detected[self.by_index[index].kind] += 1

    def _on_wrong(self, text: str) -> None:
        self.noted.append(text)

    def _on_end(self, result: str, leaks: tuple[int, int]) -> None:
        self.result = result
        self.tally.leaked_descriptors += leaks[0]
        self.tally.leaked_bytes += leaks[1]

    # Faults from outside

    def _strike(self, step: int, pid: int) -> bool:
        """Those that are due when the trainer has told of a step; whether it is gone."""
        for fault in self.scenario.faults if self.outstanding is None else ():
            if fault.kind in FROM_OUTSIDE and fault.step < step and fault.index not in self.struck:
                self._on_struck(fault.index)
                if self._strike_with(fault, pid):
                    return True
        return False

    def _strike_at_start(self, pid: int) -> bool:
        """Whether the trainer is gone before it has said anything."""
        for fault in self.scenario.faults:
            if fault.kind == "kill starting trainer" and fault.index not in self.struck:
                self._on_struck(fault.index)
                time.sleep(random.Random(fault.draw).random() * 0.6)
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _strike_with(self, fault: Fault, pid: int) -> bool:
        draw = random.Random(fault.draw)
        time.sleep(draw.random() * 3e-3)  # anywhere in the next step
        if fault.kind == "stop trainer":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.random() * 0.3)
            os.kill(pid, signal.SIGCONT)
            return False
        os.kill(pid, ENDING[fault.kind])
        if not ends_within(pid, SILENCE):
            self.tally.hung += 1
            self.noted.append(f"{fault} does not end the trainer")
        return True

    def _judge(self) -> None:
        """A fault is survived if the run that it struck has lost nothing."""
        prefix = f"seed {self.scenario.seed}: "
        self.tally.wrong += [prefix + text for text in self.noted]
        if self.noted:
            return
        self.tally.injected[IN_STREAM] += self.scenario.skipped
        if self.result == self.reference:
            self.tally.survived.update(self.here)
            self.tally.survived[IN_STREAM] += self.scenario.skipped
        else:
            self.tally.data_lost += 1
            self.tally.wrong.append(f"{prefix}the final weights are not those of the undisturbed run")


def count_orphans(trainers: set[int]) -> int:
    """How many of the workers that these trainers, which are gone, have started do not end in time."""
    known, found = {str(pid).encode() for pid in trainers}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"zenflow.worker" in words and known & set(words):
                    found.append(int(entry.name))
    return sum(not ends_within(worker, ORPHAN) for worker in found)


def _child(connection: Connection, scenario: Scenario, struck: set[int], saved: tuple[int, bytes], first: bool) -> None:
    code = 1
    # A shell that starts the driver in the background has it ignore interrupts, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        life(connection, scenario, struck, saved, first)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
