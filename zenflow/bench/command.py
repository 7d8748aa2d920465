"""The command line of `zenflow-bench`."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from zenflow.bench.proof import DEFAULT_TESTS, KERNEL_TESTS
from zenflow.bench.registry import CONTESTANTS
from zenflow.bench.shapes import SHAPES
from zenflow.bench.variants import DEFAULT_VARIANTS, Variant, parse_variant
from zenflow.cores import physical_cores

LAYOUTS = ("columns", "rows")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STEP_HELP = """\
Time a training step of ZenFlow beside other trainers: same model, same batch, random weights, random tokens, each
trainer in a fresh process, the floor (forward and backward alone) before and after them. Writes step.csv, step.md and
step.png, with --trace also traces. The tests run first; unless they are green, times are printed without ratios.

  zenflow-bench step
  zenflow-bench step --shape 3B --zenflow U=4 U=8 "U=4,accumulate_on=host" --selection
  zenflow-bench step --trainers zenflow sync --contention 8 12 --growth
"""

KERNELS_HELP = """\
Time every kernel beside torch, torch.compile, the well-known kernel for its job and a copy of as many bytes, all in
this run; then a whole model's parameters in grouped launches. Writes kernels.csv, kernels.md, roofline.png and
shares.png. The tests run first; unless they are green, times are printed without shares. kernels/README.md says what
each op moves.

  zenflow-bench kernels
  zenflow-bench kernels --quick --ops fused_step gather_channels --layouts columns
  zenflow-bench kernels --sizes 64M --dtypes bf16 --tune fused_step --no-compile --budget 300
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, 1 for red tests or a failed trainer, 2 (SystemExit) for bad arguments."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["_child"]:
        from zenflow.bench import child

        # Trainers of other projects hang or crash while the interpreter ends.
        os._exit(child.main(words[1]))
    if words[:1] == ["_hog"]:
        from zenflow.bench import hog

        return hog.main(words[1])
    args = _parser().parse_args(words)
    args.words = words
    return args.run(args)


def _parser() -> ArgumentParser:
    whole_words = partial(ArgumentParser, allow_abbrev=False)  # `what_is_measured` knows options by their names
    parser = whole_words(prog="zenflow-bench", description="Measure ZenFlow on this machine.")
    commands = parser.add_subparsers(required=True, metavar="{step,memory,kernels}", parser_class=whole_words)
    _add_step(
        commands.add_parser(
            "step",
            help="step times beside other trainers",
            description=STEP_HELP,
            formatter_class=RawDescriptionHelpFormatter,
        )
    )
    memory = commands.add_parser(
        "memory",
        help="the CPU optimizer's pass beside the memory's limit",
        description="The CPU optimizer's pass and a triad (a = b + s c) over arrays that no cache holds, by threads: "
        "GB/s of the bytes that each must move, and the share of the triad's that the pass reaches.",
    )
    memory.add_argument("--threads", type=_integer(1), nargs="+", default=[4, 8, 12], metavar="N")
    _add_place(memory)
    memory.set_defaults(run=_memory)
    _add_kernels(
        commands.add_parser(
            "kernels",
            help="every kernel beside torch and a copy of as many bytes",
            description=KERNELS_HELP,
            formatter_class=RawDescriptionHelpFormatter,
        )
    )
    return parser


def _add_step(step: ArgumentParser) -> None:
    step.set_defaults(run=_step)
    _add_model(step)
    _add_trainers(step)
    _add_tables(step)
    run = step.add_argument_group("run")
    run.add_argument("--tests", nargs="+", default=list(DEFAULT_TESTS), metavar="PATH", help="run before measuring")
    _add_place(run)
    run.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="seconds for a trainer (600)")


def _add_model(step: ArgumentParser) -> None:
    model = step.add_argument_group("model and batch")
    model.add_argument("--shape", choices=SHAPES, default="1.5B", help="a Qwen2.5 model's shape (default: %(default)s)")
    model.add_argument("--batch", type=_integer(1), default=8, metavar="N", help="sequences (default: %(default)s)")
    model.add_argument("--length", type=_integer(2), default=512, metavar="N", help="tokens of each (default: 512)")
    model.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    model.add_argument("--clip", type=_positive, default=1.0, metavar="X", help="gradient norm (default: 1.0)")
    model.add_argument("--lr", type=_positive, default=1e-5, metavar="X", help="learning rate (default: 1e-5)")
    model.add_argument("--device", type=_device, default="auto", metavar="{auto,cuda,cpu}")


def _add_trainers(step: ArgumentParser) -> None:
    who = step.add_argument_group("trainers")
    who.add_argument(
        "--trainers",
        nargs="+",
        choices=CONTESTANTS,
        default=list(CONTESTANTS),
        metavar="NAME",
        help=f"which, beside the floor (default: all): {', '.join(CONTESTANTS)}",
    )
    who.add_argument(
        "--zenflow",
        nargs="+",
        type=_variant,
        default=[parse_variant(text) for text in DEFAULT_VARIANTS],
        metavar="SETTINGS",
        help="one run for each: k, U or any ZenFlowConfig field, as in U=4,k=0.05 "
        f"(default: {' '.join(DEFAULT_VARIANTS)})",
    )
    who.add_argument(
        "--windows",
        type=_integer(1),
        default=10,
        metavar="N",
        help="timed windows of each ZenFlow; the other trainers take as many steps as the first (default: 10)",
    )
    who.add_argument(
        "--peer-windows",
        type=_integer(1),
        metavar="N",
        help="of the steps of the trainers that keep their state on the CPU and are not ours (default: as --windows)",
    )


def _add_tables(step: ArgumentParser) -> None:
    more = step.add_argument_group("further tables")
    more.add_argument("--trace", action="store_true", help="of ZenFlow and sync: what ran under what, and its picture")
    more.add_argument("--selection", action="store_true", help="what selecting costs each ZenFlow")
    more.add_argument(
        "--contention",
        nargs="+",
        type=_cores,
        default=[],
        metavar="N",
        help="the floor beside N busy CPU threads, and beside copies",
    )
    more.add_argument("--hog-matrices", type=_integer(1), default=8, metavar="N", help="of 268 MB (default: 8)")
    more.add_argument("--growth", action="store_true", help="the first ZenFlow by model size and worker cores")
    more.add_argument("--growth-shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "3B"], metavar="SHAPE")
    more.add_argument("--growth-cores", nargs="+", type=_integer(1), default=[4, 8, 12], metavar="N")


def _add_place(run: ArgumentParser) -> None:
    run.add_argument("--out", type=_folder, metavar="FOLDER", help="default: bench-results/DATE_TIME")
    run.add_argument("--commit", default="", help="what to write as the commit where there is no git")


def _add_kernels(kernels: ArgumentParser) -> None:
    kernels.set_defaults(run=_kernels)
    what = kernels.add_argument_group("what is measured")
    what.add_argument("--ops", nargs="+", type=_op, metavar="OP", help="default: all")
    what.add_argument("--sizes", nargs="+", type=_size, metavar="N", help="elements, as in 64M (default: 64M 256M)")
    what.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], help="default: both")
    what.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of channels (default: both)"
    )
    what.add_argument("--ratio", type=_share, default=0.1, metavar="K", help="share that is selected (default: 0.1)")
    what.add_argument("--shape", choices=SHAPES, help="the whole model's (default: 3B)")
    what.add_argument(
        "--tune", nargs="+", type=_op, default=[], metavar="OP", help="try other launch constants of these"
    )
    what.add_argument("--no-model", action="store_true", help="leave out the whole model")
    what.add_argument("--no-compile", action="store_true", help="leave out torch.compile, the longest part")
    what.add_argument("--quick", action="store_true", help="64M, bf16 and a small model, measured for a shorter time")
    run = kernels.add_argument_group("run")
    run.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the runner and torch alone, tiny")
    run.add_argument("--tests", nargs="+", default=list(KERNEL_TESTS), metavar="PATH", help="run before measuring")
    _add_place(run)
    run.add_argument("--budget", type=_positive, default=1e9, metavar="S", help="seconds after which nothing is begun")


def _step(args: Namespace) -> int:
    from zenflow.bench import step

    # `timeout` and schedulers end a run with SIGTERM: the child that runs must end, too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return step.run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _memory(args: Namespace) -> int:
    from zenflow.bench import memory

    return memory.run(args)


def _kernels(args: Namespace) -> int:
    from zenflow.bench import kernels

    return kernels.run(args)


def _integer(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise ArgumentTypeError(f"{text!r}; allowed: an integer >= {low}")
        return int(text)

    return integer


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r}; allowed: a finite number > 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise ArgumentTypeError(f"{text!r}; allowed: a number > 0, at most 1")
    return value


def _size(text: str) -> int:
    digits, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not digits.isdecimal() or not int(digits):
        raise ArgumentTypeError(f"{text!r}; allowed: a whole number >= 1, also of K, M or G")
    return int(digits) * unit


def _op(text: str) -> str:
    from zenflow.bench.kernel_ops import OPS

    if text not in OPS:
        raise ArgumentTypeError(f"{text!r}; allowed: {', '.join(OPS)}")
    return text


def _cores(text: str) -> int:
    last = len(physical_cores()) - 1
    if not text.isdecimal() or not 1 <= int(text) <= last:
        raise ArgumentTypeError(f"{text!r}; allowed: an integer from 1 to {last}, one core less than there are")
    return int(text)


def _device(text: str) -> str:
    """auto, cpu, or cuda where torch sees one: asked before the tests run."""
    if text == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ArgumentTypeError("'cuda', and torch sees no CUDA device here; allowed: auto, cpu")
    elif text not in ("auto", "cpu"):
        raise ArgumentTypeError(f"{text!r}; allowed: auto, cuda, cpu")
    return text


def _folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{text!r}, which cannot be made ({error.strerror}); allowed: a folder") from error
    return folder


def _variant(text: str) -> Variant:
    try:
        return parse_variant(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
