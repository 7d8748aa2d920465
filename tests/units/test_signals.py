"""Handlers that raise, at random moments of a child's start and of the wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from zenflow.signals import signals_held, wait_for


class Alarm(Exception):
    pass


@pytest.fixture
def raising():
    """SIGTERM raises Alarm in the main thread."""

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGTERM, ring)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate_after(seconds: float) -> threading.Thread:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    return timer


def test_a_signal_is_handled_after_the_block(raising):
    reached = False
    with pytest.raises(Alarm), signals_held():
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
    assert reached


def test_each_signal_is_handled_by_its_own_handler():
    seen = []
    before = [signal.signal(number, lambda *got: seen.append(got[0])) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGTERM, signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_a_default_handler_is_left_alone():
    """Nothing of Python's runs there, and the signal must still end the process."""
    code = "import os, signal; from zenflow.signals import signals_held\nwith signals_held(): os.kill(os.getpid(), 15)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=300).returncode == -signal.SIGTERM


def test_handlers_are_back_after_an_error(raising):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError), signals_held():
        raise OSError
    assert signal.getsignal(signal.SIGTERM) is handler


def test_another_thread_may_hold(raising):
    thread = threading.Thread(target=lambda: signals_held().__enter__())
    thread.start()
    thread.join()
    with pytest.raises(Alarm):
        os.kill(os.getpid(), signal.SIGTERM)


def test_no_child_is_lost_and_no_wait_hangs(raising):
    """At any of these moments, without the two helpers, the child is lost or its lock is never released."""
    for moment in range(60):
        child = timer = None
        with pytest.raises(Alarm):
            try:
                with signals_held():
                    timer = terminate_after(moment * 1e-4)
                with signals_held():
                    child = subprocess.Popen(["sleep", "60"])
                wait_for(child)
            finally:
                if child is not None:
                    child.kill()
                    assert wait_for(child, 10) == -signal.SIGKILL
        timer.join()
        assert not child or child.returncode == -signal.SIGKILL


def test_a_signal_is_noticed_during_a_wait(raising):
    with subprocess.Popen(["sleep", "60"]) as child:
        begin = time.monotonic()
        terminate_after(0.02)
        try:
            with pytest.raises(Alarm):
                wait_for(child)
        finally:
            child.kill()
        assert time.monotonic() - begin < 30


def test_a_wait_ends_in_time():
    with subprocess.Popen(["sleep", "60"]) as child:
        with pytest.raises(subprocess.TimeoutExpired, match=r"0\.05 seconds"):
            wait_for(child, 0.05)
        child.kill()
        assert wait_for(child) == -signal.SIGKILL
