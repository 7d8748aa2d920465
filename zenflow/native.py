"""The compiled pass of the CPU optimizer, and the two memory orderings that Python lacks.

`load()` builds native_src/adamw.c with the system's C compiler into a per-user cache and binds it with ctypes. Without
a compiler, or with ZENFLOW_NATIVE=0, it returns None: the torch fallback gives the same bits, several times slower. The
orderings are then plain accesses, enough on x86-64 only: elsewhere `load()` raises RuntimeError.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("native_src") / "adamw.c"
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-std=gnu11", "-shared", "-fPIC"),
)
GRAD_KINDS = {"float32": 0, "bfloat16": 1}
OUT_KINDS = {None: 0, "bfloat16": 1, "float16": 2}
log = logging.getLogger("zenflow")


class Native:
    """The functions of one built library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library, orderings = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        self._adamw = library.zenflow_adamw
        self._adamw.argtypes = [pointer] * 7 + [long] * 2 + [pointer] + [integer] * 4
        self._round = library.zenflow_round
        self._round.argtypes = [pointer, pointer, long, integer, integer]
        # Held GIL: these take nanoseconds, releasing it would cost more.
        self.load_acquire, self.store_release = orderings.zenflow_load_acquire, orderings.zenflow_store_release
        self.load_acquire.argtypes, self.load_acquire.restype = [pointer], ctypes.c_uint64
        self.store_release.argtypes = [pointer, ctypes.c_uint64]
        self._adamw.restype = self._round.restype = self.store_release.restype = None

    def adamw(
        self,
        master: np.ndarray,
        exp_avg: np.ndarray,
        exp_avg_sq: np.ndarray,
        grad: np.ndarray,
        out: np.ndarray | None,
        step_size: np.ndarray,
        denom_scale: np.ndarray,
        *,
        rows: int,
        cols: int,
        constants: np.ndarray,
        out_dtype: str | None,
        by_column: bool,
        threads: int,
    ) -> None:
        """One AdamW update of a contiguous piece `[rows, cols]`, in place.

        master, exp_avg, exp_avg_sq fp32; grad fp32, or bf16 as uint16; out uint16 or None; step_size and denom_scale
        fp32, one a channel; constants fp32 `[7]`: beta1, 1 - beta1, beta2, 1 - beta2, eps, decay and the number of
        steps that the gradient is divided by.
        """
        grad_kind = GRAD_KINDS["bfloat16" if grad.dtype == np.uint16 else "float32"]
        self._adamw(
            *(x.ctypes.data for x in (master, exp_avg, exp_avg_sq, grad)),
            None if out is None else out.ctypes.data,
            *(x.ctypes.data for x in (step_size, denom_scale)),
            *(rows, cols, constants.ctypes.data),
            *(grad_kind, OUT_KINDS[out_dtype], int(by_column), threads),
        )

    def round(self, master: np.ndarray, out: np.ndarray, out_dtype: str, threads: int) -> None:
        """out (uint16) = master (fp32) rounded to nearest even."""
        self._round(master.ctypes.data, out.ctypes.data, master.size, OUT_KINDS[out_dtype], threads)


@lru_cache(maxsize=1)
def load() -> Native | None:
    """The compiled pass, or None where it is switched off or cannot be built; says so once.

    RuntimeError instead of None on processors that do not order plain accesses.
    """
    if os.environ.get("ZENFLOW_NATIVE", "1") == "0":
        _require_ordered_accesses("ZENFLOW_NATIVE=0 switches its compiled pass off")
        return None
    try:
        return Native(build())
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _require_ordered_accesses(f"its compiled pass cannot be built: {detail}")
        log.warning("the CPU optimizer runs without its compiled pass, several times slower: %s", detail)
        return None


def load_acquire(address: int) -> int:
    """The u64 at `address`; what was written before its release is visible afterwards.

    Without the compiled pass it is a plain read, which x86-64 orders; `load` refuses other processors.
    """
    library = load()
    return ctypes.c_uint64.from_address(address).value if library is None else library.load_acquire(address)


def store_release(address: int, value: int) -> None:
    """Write the u64 at `address` after all that was written before; see `load_acquire` about the plain write."""
    library = load()
    if library is None:
        ctypes.c_uint64.from_address(address).value = value
    else:
        library.store_release(address, value)


def build(folder: Path | None = None) -> Path:
    """Build the library in `folder` (default: the per-user cache) unless it is there; OSError without a compiler."""
    compiler = _compiler()
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, " ".join([*compiler, *FLAGS]).encode(), _processor().encode()]))
    folder = cache_folder() if folder is None else folder
    library = folder / f"adamw-{key.hexdigest()[:20]}.so"
    if not library.exists():
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        try:
            command = [*compiler, *FLAGS, str(SOURCE), "-o", partial, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            os.replace(partial, library)
        finally:
            Path(partial).unlink(missing_ok=True)
    return library


def cache_folder() -> Path:
    """A folder that only this user can write: code and converted models are loaded from it. OSError without one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (Path(base) / "zenflow", Path(tempfile.gettempdir()) / f"zenflow-{os.geteuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.lstat()
        except OSError:
            continue
        if state.st_uid == os.geteuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    raise OSError("no folder for cached files that only this user can write: set XDG_CACHE_HOME to one")


def _require_ordered_accesses(reason: str) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(f"the CPU optimizer needs a C compiler on this machine ({platform.machine()}), but {reason}")


def _compiler() -> list[str]:
    """The command of the compiler, its program as a path; CC may have further words, as in `ccache gcc`."""
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC is {os.environ['CC']!r}, which is no shell command: {error}") from error
    for program, *words in filter(None, (chosen, ["cc"], ["gcc"], ["clang"])):
        if found := shutil.which(program):
            return [found, *words]
    raise OSError("no C compiler found (CC, cc, gcc, clang)")


def _processor() -> str:
    """What -march=native depends on, and the C library's machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    first = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(first.get(key, "") for key in ("model name", "flags", "Features"))])
