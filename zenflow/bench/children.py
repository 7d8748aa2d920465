"""Starts children, waits for them, and leaves nothing of them behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from zenflow.bench.registry import Job
from zenflow.signals import signals_held, wait_for


def run_job(job: Job, log: Path, timeout: float) -> dict[str, Any]:
    """The child's result, or `{"error": one line}`; what it and its libraries printed is in `log`.

    The answer goes through a file: a process that outlives the child could hold a pipe open for ever.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".json")
    with open(log, "w", encoding="utf-8") as errors, open(answer, "w", encoding="utf-8") as out:
        command = [*module_command(), "_child", json.dumps(asdict(job))]
        with started(command, subprocess.DEVNULL, out, errors) as child:
            try:
                code = wait_for(child, timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"killed after {timeout:g} s"}
    lines = answer.read_text(encoding="utf-8").splitlines()
    if lines:
        return json.loads(lines[-1])
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return {"error": f"the process ended with exit code {code} without a result: {''.join(last)}"}


def module_command() -> list[str]:
    """This interpreter with `zenflow-bench`, installed or not."""
    return [sys.executable, "-m", "zenflow.bench"]


@contextmanager
def started(
    command: list[str], stdin: int, stdout: int | IO[str], stderr: int | IO[str] | None
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which ends with this block, and with it all that it has started."""
    child, env = None, environment()
    try:
        with signals_held():
            child = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, text=True, env=env, start_new_session=True
            )
        yield child
    finally:
        if child is not None:
            # Some trainers start processes that outlive them.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            wait_for(child)
            _wait_for_group(child.pid)


def environment() -> dict[str, str]:
    """This process's, and the packages where this process finds them."""
    places = [str(Path(find_spec(name).origin).parents[1]) for name in ("zenflow", "zenflow_kernels")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)}


def _wait_for_group(group: int, seconds: float = 10) -> None:
    """Until nobody of the group is left: the next contestant must find the memory free."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except OSError:
            return
        time.sleep(0.01)
