"""D11: nothing of ours means "whatever GPU is current" when it means the GPU that the parameters are on."""

from __future__ import annotations

import ast

from tests.house.test_imports import PRODUCT, ROOT, sources

# Of torch.cuda and its events: without an argument they take the current device, or its stream.
CALLS = ("record", "current_stream", "get_device_name", "get_device_properties", "memory_allocated", "mem_get_info")
OF_CUDA = ("synchronize", "max_memory_allocated", "reset_peak_memory_stats", "get_rng_state")


def takes_the_current_device(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    of_cuda = isinstance(owner, ast.Attribute) and owner.attr == "cuda"
    return node.func.attr in CALLS or (node.func.attr in OF_CUDA and of_cuda)


def test_streams_and_events_name_their_device():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*PRODUCT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if takes_the_current_device(node)
    ]
    assert found == []


def test_what_takes_the_current_device_is_seen():
    calls = ["event.record()", "torch.cuda.synchronize()", "torch.cuda.current_stream()", "event.record(stream)"]
    calls += ["event.synchronize()", "torch.cuda.current_stream(device)"]
    seen = [takes_the_current_device(ast.parse(call, mode="eval").body) for call in calls]
    assert seen == [True, True, True, False, False, False]
