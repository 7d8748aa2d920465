"""The order of streams on a GPU: no waiting where none is promised, and the right bits when a stream is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import (
    RULES,
    STREAMS,
    Builder,
    Pair,
    assert_same_bits,
    differing,
    make_gradients,
    make_parameters,
    snapshot,
)
from zenflow.pipeline import Pipeline

pytestmark = pytest.mark.gpu

SHAPES = [(1024, 2048), (517, 1000), (64,)]
SLOW = 50_000_000  # cycles: tens of milliseconds, longer than every copy of a window


def sleep_on(stream: torch.cuda.Stream, cycles: int = SLOW) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def one_pass(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """A backward pass that hooks can see and that leaves copies of `grads`, all on the device."""
    torch.autograd.backward(list(parameters), [grad.clone() for grad in grads])


@contextmanager
def no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever waits for the device, in torch or by name, fails."""

    def waited(*_: object, **__: object) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", waited)
        patch.setattr(torch.cuda.Stream, "synchronize", waited)
        patch.setattr(torch.cuda, "synchronize", waited)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


# By `stagger`: steps in which the host asks, steps that are not watched (questions, and what compiles), and those in
# whose backward pass results land.
ORDINARY = {False: ([1, 6], (1, 2, 3, 6), (9, 12, 15)), True: ([1, 5, 6], range(1, 7), (8, 9, 11, 12, 14, 15))}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("clip", "over"), [(None, "step"), (1.0, "step"), (1.0, "average")], ids=["no-clip", "clip", "clip-average"]
)
@pytest.mark.parametrize("stagger", [False, True], ids=["together", "staggered"])
def test_an_ordinary_step_never_synchronises(
    stagger: bool, clip: float | None, over: str, rule: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward, step and window's end, with uploads under backward. The first selection asks, and the check in the
    first window of each cohort that could upload; nothing else."""
    questions, unwatched, landing = ORDINARY[stagger]
    asked: list[int] = []
    question = Pipeline.is_finite
    monkeypatch.setattr(Pipeline, "is_finite", lambda self: asked.append(self.clock.state.step) or question(self))
    parameters = make_parameters(SHAPES, torch.bfloat16, "cuda")
    settings = {"topk_ratio": 0.1, "update_interval": 3, "select_interval": 1000, "max_grad_norm": clip}
    settings["importance_over"] = over
    engine = build(parameters, lr=0.01, stagger=stagger, **settings, **RULES[rule])
    stream = [[grad.cuda() for grad in grads] for grads in make_gradients(SHAPES, torch.bfloat16, 15)]
    for step, grads in enumerate(stream, start=1):
        # What is measured is one step, not how far the host may run ahead of the worker.
        engine._pipeline.wait_for_worker()
        torch.cuda.synchronize()
        waited = engine.stats().host_wait_seconds
        for group in engine.param_groups:
            group["lr"] = 0.01 / step
        if step in unwatched:
            engine.zero_grad()
            one_pass(parameters, grads)
            engine.step()
            continue
        with no_synchronisation(monkeypatch):
            engine.zero_grad()
            one_pass(parameters, grads)
            taken = engine._pipeline.uploads.in_transit
            engine.step()
        assert taken == (step in landing)
        assert engine.stats().host_wait_seconds == waited
    assert asked == questions
    assert engine.stats().skipped_steps == 0


WINDOWS = {
    "overlap": ({}, (4, 6, 8, 10)),
    "no-overlap": ({"overlap_step": False}, ()),
    "staggered": ({"stagger": True}, range(3, 11)),
}
CASES = [("gpu", torch.bfloat16), ("gpu", torch.float32), ("host", torch.bfloat16), ("replay", torch.float32)]


@pytest.mark.parametrize("slow", STREAMS)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=["gpu-bf16", "gpu-fp32", "host-bf16", "replay-fp32"])
def test_a_slow_stream_changes_no_bit(slow: str, windows: str, rule: str, dtype: torch.dtype, build: Builder) -> None:
    """Fold after the last copy, copy after the fold, upload after gradients and worker, own writes after the upload,
    and the worker's next result only when the upload has left the shadow."""
    given, landing = WINDOWS[windows]
    settings = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 10, **given}
    settings |= {"bucket_bytes": 1 << 20, "upload_check": False, **RULES[rule]}
    pair = Pair(build, make_parameters(SHAPES, dtype, "cuda"), lr=0.02, **settings)
    for number, grads in enumerate(make_gradients(SHAPES, dtype, 11), start=1):
        sleep_on(STREAMS[slow](pair.engine))
        one_pass_of(pair, grads)
        assert pair.engine._pipeline.uploads.in_transit == (number in landing)
        pair.step_on_grad()
    pair.check_state()


@pytest.mark.parametrize("rule", RULES)
def test_a_small_copy_to_the_host_overtakes_a_windows_copies(rule: str, build: Builder) -> None:
    """An `.item()` on the compute stream comes back while 512 MiB are still on their way to the ring.

    It comes back behind all of them, always, where the copies are queued on one stream.
    """
    parameter = nn.Parameter(torch.zeros(2**14, 2**14, dtype=torch.bfloat16, device="cuda"))
    word = torch.ones(1, device="cuda")
    # Windows end in even steps, and their results, which would be waited for, land in odd ones.
    settings = {"update_interval": 2, "visible_after": 1, "bucket_bytes": 2**26}
    engine = build([parameter], topk_ratio=0.01, **settings, **RULES[rule])
    overtaken = False
    for _ in range(60):  # beside other processes on the device, one copy may come to wait for its turn that long
        parameter.grad = torch.ones_like(parameter)
        engine._pipeline.wait_for_worker()
        torch.cuda.synchronize()
        engine.step()
        word.item()
        overtaken = not engine._pipeline.sender.stream.query()
        if overtaken:
            break
    assert overtaken, "every small copy waited for all that was on its way"


def one_pass_of(pair: Pair, grads: Sequence[Tensor]) -> None:
    for parameter in pair.parameters:
        parameter.grad = None
    one_pass(pair.parameters, [grad.cuda() for grad in grads])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("upload", ["backward", "step"])
def test_c2_a_forward_at_once_sees_one_whole_version(upload: str, rule: str, build: Builder) -> None:
    """C2: the upload stream is slow, and the forward is queued right behind step(): never a mix of two versions."""
    settings = {"topk_ratio": 0.3, "update_interval": 2, "upload": upload, "upload_check": False, **RULES[rule]}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, "cuda"), lr=0.02, bucket_bytes=1 << 18, **settings)
    for number, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 10), start=1):
        before = [parameter.detach().clone() for parameter in pair.parameters]
        sleep_on(pair.engine._pipeline.uploader.stream)
        one_pass_of(pair, grads)
        assert pair.engine._pipeline.uploads.in_transit == (upload == "backward" and number in (4, 6, 8, 10))
        pair.model.step(grads)
        pair.engine.step()
        seen = [parameter.detach().clone() for parameter in pair.parameters]
        for index, (now, old) in enumerate(zip(seen, before, strict=True)):
            assert_same_bits(now, pair.model.visible(index), f"weight {index} in step {number}")
            assert differing(now, old)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_d11_the_device_that_is_current_does_not_matter(rule: str, index: int, build: Builder) -> None:
    """D11: parameters on a GPU that is not the current one: right there, nothing on the other, and it stays current."""
    if torch.cuda.device_count() <= index:
        pytest.skip("needs two GPUs")
    elsewhere = [other for other in range(torch.cuda.device_count()) if other != index]
    before = [torch.cuda.memory_allocated(other) for other in elsewhere]
    settings = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 6, "upload_check": False}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, f"cuda:{index}"), lr=0.02, **settings, **RULES[rule])
    pipeline = pair.engine._pipeline
    assert {pipeline.sender.stream.device_index, pipeline.uploader.stream.device_index} == {index}
    current: list[int] = []
    for parameter in pair.parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: current.append(torch.cuda.current_device()))
    for grads in make_gradients(SHAPES, torch.bfloat16, 11):
        sleep_on(torch.cuda.current_stream(index))  # who asks the other device comes too early
        pair.step(grads)
        assert torch.cuda.current_device() == 0
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()
    pair.check_state()
    pair.engine.close()
    assert set(current) == {index}, "autograd's own thread is on the parameter's device"
    assert torch.cuda.current_device() == 0
    assert [torch.cuda.memory_allocated(other) for other in elsewhere] == before
    assert all(bool(weight.isfinite().all()) for weight in snapshot(pair.parameters))
