"""`zenflow-bench kernels`: the runner on the CPU, and what it refuses."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from zenflow_kernels import cards

from zenflow.bench import kernels, session
from zenflow.bench.command import main
from zenflow.bench.kernel_clock import COPY_LIMIT, Clock, Times
from zenflow.bench.kernel_ops import OPS
from zenflow.bench.proof import Proof

CPU = torch.device("cpu")
SMALL = ["kernels", "--device", "cpu", "--quick"]
PICTURES = ("roofline.png", "shares.png")


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """The command without its tests' run, each call timed for a moment: code, rows of the CSV, what it printed."""

    def run(*words: str, green: bool = True) -> tuple[int, list[dict[str, str]], str]:
        proof = Proof(green, not green, "3 passed" if green else "1 failed")
        monkeypatch.setattr(session, "prove", lambda *_: proof)
        monkeypatch.setattr(kernels, "Clock", lambda device, *_: Clock(device, 0, 1))
        code = main([*SMALL, "--out", str(tmp_path / "out"), *words])
        with open(tmp_path / "out" / "kernels.csv", encoding="utf-8", newline="") as file:
            return code, list(csv.DictReader(file)), capsys.readouterr().out

    return run


def test_every_op_is_measured_and_its_figures_agree(bench, tmp_path):
    code, rows, printed = bench()
    assert code == 0
    ops = [row for row in rows if row["table"] == "op"]
    layouts = {(row["op"], row["layout"]) for row in ops}
    assert layouts == {(name, layout) for name, op in OPS.items() for layout in op.layouts}
    known = {row["op"]: row["contestant"] for row in ops if row["contestant"] != "torch"}
    assert known == {name: op.known for name, op in OPS.items() if op.known}
    for row in rows:
        p20, p50, p80 = (float(row[name]) for name in ("p20_ms", "p50_ms", "p80_ms"))
        assert 0 < p20 <= p50 <= p80
        assert float(row["gb_per_s"]) == pytest.approx(int(row["bytes"]) / p50 / 1e6)
        assert float(row["share"]) == pytest.approx(float(row["copy_ms"]) / p50)
        assert float(row["times_copy"]) == pytest.approx(1 / float(row["share"]))
        assert int(row["bus_bytes"]) >= int(row["bytes"]) > 0
        assert row["torch"] == torch.__version__ and row["triton"] and {"gpu", "driver", "commit"} <= row.keys()
    models = [row for row in rows if row["table"] == "model"]
    assert {row["layout"] for row in models} == {"columns", "rows"} and {row["shape"] for row in models} == {"tiny"}
    assert printed.startswith((tmp_path / "out" / "kernels.md").read_text())
    assert "of copy" in printed and "with sectors" in printed and "x copy" in printed
    for name in PICTURES:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_with_a_gpu_ours_and_the_compiled_reference_stand_beside(bench, monkeypatch):
    """The path that a GPU takes, on the CPU, where ours is the reference and nothing is compiled."""
    compiled = []
    monkeypatch.setattr(kernels.KernelSession, "on_gpu", True)
    monkeypatch.setattr(torch, "compile", lambda run, **options: compiled.append(options) or run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compiled.append("reset"))
    code, rows, printed = bench(
        "--ops", "gather_channels", "fused_step_whole", "stochastic_rounding", "--sizes", "2K", "1K"
    )  # fmt: skip
    assert code == 0
    assert "torch.compile" not in {row["contestant"] for row in rows if row["op"] == "stochastic_rounding"}
    beside = [row["contestant"] for row in rows if row["op"] == "fused_step_whole" and row["numel"] == "1024"]
    assert beside == ["triton", "torch", "torch fused AdamW on fp32 masters", "torch.compile"]
    assert [row["contestant"] for row in rows if row["numel"] == "2048"].count("torch.compile") == 0
    assert compiled == [{"dynamic": False}, "reset"] * 3
    assert {row["contestant"] for row in rows if row["table"] == "model"} == {"triton"}
    assert {row["captured"] for row in rows} == {"False"} and "torch.index_select, its launches" in printed


def test_a_call_is_timed_as_a_graph_where_it_can_be_one(monkeypatch):
    """The clock's part on a GPU, with a stand-in for the graph and for Triton's timer."""
    log = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        log.append("capture")
        yield

    def do_bench(run, warmup, rep, quantiles):
        run()
        log.append((warmup, rep, tuple(quantiles)))
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    clock, timer = Clock(torch.device("cuda"), 5, 20), (5, 20, (0.2, 0.5, 0.8))
    assert clock.time(lambda: log.append("run"), captured=True) == Times(1.0, 2.0, 3.0, captured=True)
    assert log == ["run", "capture", "run", "replay", timer]
    log.clear()
    assert clock.time(lambda: log.append("run"), captured=False) == Times(1.0, 2.0, 3.0)
    assert log == ["run", "run", timer]
    log.clear()

    def asks_the_device() -> None:
        log.append("run")
        if log.count("capture") and log.count("run") == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert not clock.time(asks_the_device, captured=True).captured
    assert log == ["run", "capture", "run", "run", timer]
    with pytest.raises(ZeroDivisionError):
        clock.time(lambda: 1 // 0, captured=True)


def test_red_tests_leave_no_share(bench, tmp_path):
    code, rows, printed = bench("--ops", "gather_channels", "--no-model", green=False)
    assert code == 1
    assert "NO SHARES" in printed and "1 failed" in printed and "of copy |" not in printed
    assert all(float(row["p50_ms"]) > 0 and "share" not in row and "bus_share" not in row for row in rows)
    assert not [name for name in PICTURES if (tmp_path / "out" / name).exists()]


def test_what_was_asked_for_is_measured(bench):
    words = ["--ops", "gather_channels", "partial_norms", "--sizes", "1K", "1000003", "--dtypes", "fp32", "--no-model"]
    code, rows, _ = bench(*words, "--layouts", "rows", "--ratio", "0.25")
    assert code == 0
    assert [(row["op"], row["layout"], row["numel"], row["contestant"]) for row in rows] == [
        ("gather_channels", "rows", "1024", "torch"),
        ("partial_norms", "whole", "1024", "torch"),
        ("partial_norms", "whole", "1024", "torch.linalg.vector_norm"),
        ("gather_channels", "rows", "999936", "torch"),
        ("partial_norms", "whole", "999936", "torch"),
        ("partial_norms", "whole", "999936", "torch.linalg.vector_norm"),
    ]
    assert {(row["dtype"], row["ratio"]) for row in rows} == {("fp32", "0.25")}
    assert int(rows[0]["bytes"]) == 2 * 4 * 1024 // 4


def test_constants_are_tried_on_the_smallest_size(bench):
    code, rows, printed = bench(
        "--ops", "select_channels", "gather_channels", "--sizes", "4K", "1K", "--no-model", "--tune", "select_channels"
    )  # fmt: skip
    assert code == 0
    tried = [row for row in rows if row["table"] == "tune"]
    assert {(row["op"], row["numel"], row["same_bits"]) for row in tried} == {("select_channels", "1024", "True")}
    assert [row["today"] for row in tried] == ["True"] + ["False"] * 3
    assert sum(row["best"] == "True" for row in tried) == 1
    assert {row["constants"].split()[0] for row in tried} == {"topk.BLOCK=2048", "topk.BLOCK=4096"}
    assert "## Constants" in printed


def entry_in(printed: str) -> dict:
    """The entry of `cards.CARDS` that a report ends with, as Python reads it."""
    text = printed.split("## For zenflow_kernels/cards.py")[1].split("```py\n")[1].split("```")[0]
    return ast.literal_eval("{" + text + "}")


def test_a_search_prints_the_cards_entry(bench, tmp_path, monkeypatch):
    """Found for two classes, beside what the card has; what was found is what `cards` then gives to launches."""
    known = {"a card": {"fused_step": {"row float32": {"WARPS": 2}}, "select_channels": {"all": {"WARPS": 8}}}}
    monkeypatch.setattr(cards, "CARDS", known)
    monkeypatch.setattr(cards, "card", lambda device: "a card")
    cards._of_card.cache_clear()
    times = iter(range(1000, 0, -1))  # each setting is faster than the one before
    monkeypatch.setattr(kernels.KernelSession, "time", lambda self, call: Times(*[float(next(times))] * 3))
    words = ["--ops", "fused_step", "fused_step_whole", "--dtypes", "bf16", "--layouts", "columns", "--sizes", "1K"]
    code, rows, printed = bench(*words, "--no-model", "--tune", "fused_step", "fused_step_whole")
    assert code == 0
    best = {"STEP_TILE": 65536, "FOLD_BLOCK": 8192, "UPDATE_BLOCK": 2048, "WARPS": 8, "REGISTERS": 256}
    whole = {name: value for name, value in best.items() if name not in ("FOLD_BLOCK", "REGISTERS")}
    found = {"row float32": {"WARPS": 2}, "column bfloat16": best, "whole bfloat16": whole}
    assert entry_in(printed) == {"a card": {**known["a card"], "fused_step": found}}
    assert entry_in((tmp_path / "out" / "kernels.md").read_text()) == entry_in(printed)
    monkeypatch.setattr(cards, "CARDS", entry_in(printed))
    cards._of_card.cache_clear()
    given = cards.constants("fused_step", "column bfloat16", CPU, **dict.fromkeys(best, 0))
    cards._of_card.cache_clear()
    assert given == best


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ops", "fused_step", "--tune", "fused_step"], "Nothing: of what was tried, today's"),
        (["--ops", "partial_norms", "--tune", "partial_norms"], None),
        (["--ops", "partial_norms"], None),
    ],
    ids=["today's are the best", "bits depend on them", "no search"],
)
def test_a_search_that_ships_nothing_says_so(words, said, bench, monkeypatch):
    monkeypatch.setattr(cards, "card", lambda device: "a card")
    times = iter(range(1, 1000))  # each setting is slower
    monkeypatch.setattr(kernels.KernelSession, "time", lambda self, call: Times(*[float(next(times))] * 3))
    code, _, printed = bench(*words, "--no-model", "--layouts", "rows", "--sizes", "1K")
    assert code == 0
    assert ("cards.py" in printed) is (said is not None) and (said or "") in printed


def test_a_broken_op_costs_its_own_rows_alone(bench, monkeypatch):
    def broken(problem):
        raise RuntimeError("this card\nhas no such thing")

    monkeypatch.setitem(OPS, "partial_norms", replace(OPS["partial_norms"], build=broken))
    code, rows, printed = bench("--ops", "partial_norms", "select_channels", "--no-model")
    assert code == 1
    errors = {row["op"]: row["error"] for row in rows}
    assert errors == {"partial_norms": "RuntimeError: this card", "select_channels": ""}
    assert "RuntimeError: this card" in printed


def test_a_model_or_a_search_that_cannot_be_built_is_told(bench, monkeypatch):
    def too_large(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(kernels, "model_ops", too_large)
    monkeypatch.setattr(kernels, "tune", too_large)
    code, rows, printed = bench("--ops", "close_step", "--layouts", "rows", "--tune", "close_step")
    assert code == 1
    errors = [(row["table"], row["op"], row["error"]) for row in rows]
    told = "MemoryError: out of memory"
    assert errors == [("op", "close_step", ""), ("model", "all", told), ("tune", "close_step", told)]
    assert printed.count(told) == 2


def test_an_op_without_constants_has_one_setting(bench):
    code, rows, _ = bench("--ops", "close_step", "--no-model", "--tune", "close_step")
    assert code == 0
    assert [(row["table"], row["today"], row["best"]) for row in rows] == [("op", "", ""), ("tune", "True", "True")]


def test_nothing_is_begun_after_the_budget(bench):
    code, rows, _ = bench("--ops", "select_channels", "--no-model", "--budget", "1e-9")
    assert code == 1
    assert {row["error"] for row in rows} == {"RuntimeError: not measured: the budget of 1e-09 s was spent"}


def test_without_a_gpu_it_refuses_in_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(session, "prove", lambda *_: pytest.fail("the tests ran"))
    assert main(["kernels", "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert not printed.out and len(printed.err.splitlines()) == 1 and "needs a GPU" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ops", "sort"], "'sort'; allowed: partial_norms, "),
        (["--tune", "sort"], "'sort'; allowed: partial_norms, "),
        (["--sizes", "0"], "'0'; allowed: a whole number >= 1"),
        (["--sizes", "4T"], "'4T'; allowed: a whole number >= 1, also of K, M or G"),
        (["--sizes", "M"], "'M'; allowed"),
        (["--ratio", "0"], "'0'; allowed: a finite number > 0"),
        (["--ratio", "1.5"], "'1.5'; allowed: a number > 0, at most 1"),
        (["--layouts", "diagonal"], "'diagonal'"),
        (["--dtypes", "fp64"], "'fp64'"),
        (["--shape", "7B"], "'7B'"),
        (["--budget", "-1"], "'-1'; allowed: a finite number > 0"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_before_anything_runs(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["kernels", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "--help"])
    assert ended.value.code == 0 and "--tune" in capsys.readouterr().out


def test_a_long_copy_is_scaled_from_a_shorter_one(monkeypatch):
    clock = Clock(CPU, 0, 1)
    monkeypatch.setattr("zenflow.bench.kernel_clock.COPY_LIMIT", 1 << 12)
    assert COPY_LIMIT >= 1 << 30
    assert clock.copy_ms(3 << 12) == 3 * clock.copy_ms(1 << 12) > 0
    assert list(clock.copies()) == [1 << 12]


@pytest.mark.parametrize("faster", [True, False], ids=["captured", "eager"])
def test_everything_is_compared_with_the_faster_copy_over_whole_vectors(faster, monkeypatch):
    timed: list[tuple[int, bool]] = []

    class FakeClock(Clock):
        def time(self, run, captured):
            timed.append((2 * run().numel(), captured))
            return Times(0.0, (1.0 if captured == faster else 1.5) * timed[-1][0], 0.0)

    clock, odd = FakeClock(CPU), {0: 32, 1: 32, 32: 32, 33: 64, 1000: 1024, 4099: 4128}
    assert [clock.copy_ms(n_bytes) for n_bytes in odd] == list(odd.values())
    sizes = sorted(set(odd.values()))
    assert timed == [(size, captured) for size in sizes for captured in (True, False)]
    assert clock.copies() == {size: size for size in sizes}
    monkeypatch.setattr("zenflow.bench.kernel_clock.COPY_LIMIT", 1 << 12)
    assert clock.copy_ms((1 << 12) + 1) == (1 << 12) + 1
    assert timed[len(sizes) * 2 :] == [(1 << 12, True), (1 << 12, False)]
