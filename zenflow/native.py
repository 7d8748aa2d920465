"""The compiled loops of the CPU optimizer (pass, exchange, triad), and two memory orderings that Python lacks.

`load()` builds the C files in native_src with the system's C compiler into a per-user cache and binds them with ctypes.
Without a compiler, or with ZENFLOW_NATIVE=0, it returns None: torch and NumPy give the same bits, several times
slower. The orderings are then plain accesses, enough on x86-64 only: elsewhere `load()` raises RuntimeError. Only a
library is kept for good: what was missing once (descriptors, memory, room on the disk) may be there at the next call.
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
from pathlib import Path

import numpy as np

SOURCES, HEADERS = (tuple(sorted(Path(__file__).with_name("native_src").glob(f"*.{kind}"))) for kind in "ch")
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-std=gnu11", "-shared", "-fPIC"),
)
_SEAL_BYTES = hashlib.sha256().digest_size
GRAD_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
OUT_KINDS = {None: 0, "bfloat16": 1, "float16": 2, "float32": 3}
log = logging.getLogger("zenflow")


def _structure(**formats: str) -> np.dtype:
    return np.dtype(list(formats.items()))


# What adamw.c and exchange.c read, field by field: addresses and counts as 64-bit integers.
ARRAYS = _structure(
    **dict.fromkeys(("master", "exp_avg", "exp_avg_sq", "ring", "out", "grad_kind", "out_kind", "in_place"), "i8")
)
PIECE = _structure(matrix="i8", offset="i8", rows="i8", cols="i8", row_start="i8", by_column="i8")
LANE = _structure(offset="i8", inv_scale="f4", clip="f4")
PLAN = _structure(
    **dict.fromkeys(("constants", "step_size", "denom_scale", "lanes", "n_updates", "n_lanes", "n_factors"), "i8"),
    prediction="f8",
)
ORDER = _structure(
    **dict.fromkeys(("state", "block", "shown", "leave", "enter", "n_leave", "n_enter"), "i8"),
    **dict.fromkeys(("cols", "first", "length", "by_column", "clear", "out_kind"), "i8"),
)


class Native:
    """The functions of one built library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library, orderings = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        # arrays, pieces [n], n, plans [matrices], threads: addresses of the structures above.
        self.run_pass = library.zenflow_pass
        self.run_pass.argtypes = [pointer, pointer, long, pointer, integer]
        # orders [n], n, threads.
        self.exchange = library.zenflow_exchange
        self.exchange.argtypes, self.exchange.restype = [pointer, long, integer], None
        # a, b, c: addresses of fp32 [n] at whole cache lines; n, a multiple of 16; streaming; threads.
        self.triad = library.zenflow_triad
        self.triad.argtypes = [pointer, pointer, pointer, long, integer, integer]
        # Held GIL: these take nanoseconds, releasing it would cost more.
        self.load_acquire, self.store_release = orderings.zenflow_load_acquire, orderings.zenflow_store_release
        self.load_acquire.argtypes, self.load_acquire.restype = [pointer], ctypes.c_uint64
        self.store_release.argtypes = [pointer, ctypes.c_uint64]
        self.run_pass.restype = self.triad.restype = self.store_release.restype = None


class _Kept:
    """What `load` gave last, whether it was called, and the failures that it has told of."""

    library: Native | None = None
    called = False
    told: set[str] = set()


def load() -> Native | None:
    """The compiled pass, or None where it is switched off or cannot be built now; says why once.

    RuntimeError instead of None on processors that do not order plain accesses.
    """
    if _Kept.library is None:
        _Kept.library = _load()
        _Kept.called = True
    return _Kept.library


def _load() -> Native | None:
    if os.environ.get("ZENFLOW_NATIVE", "1") == "0":
        _require_ordered_accesses("ZENFLOW_NATIVE=0 switches its compiled pass off")
        return None
    try:
        return Native(build())
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", None) or error)
        _require_ordered_accesses(f"its compiled pass cannot be built: {detail}")
        if detail not in _Kept.told:
            _Kept.told.add(detail)
            log.warning("the CPU optimizer runs without its compiled pass, several times slower: %s", detail)
        return None


def _current() -> Native | None:
    """As `load`, but without a second try: for what is called at every slot."""
    return _Kept.library if _Kept.called else load()


def load_acquire(address: int) -> int:
    """The u64 at `address`; what was written before its release is visible afterwards.

    Without the compiled pass it is a plain read, which x86-64 orders; `load` refuses other processors.
    """
    library = _current()
    return ctypes.c_uint64.from_address(address).value if library is None else library.load_acquire(address)


def store_release(address: int, value: int) -> None:
    """Write the u64 at `address` after all that was written before; see `load_acquire` about the plain write."""
    library = _current()
    if library is None:
        ctypes.c_uint64.from_address(address).value = value
    else:
        library.store_release(address, value)


def build(folder: Path | None = None) -> Path:
    """Build the library in `folder` (default: the per-user cache) unless it is whole there; OSError without a compiler.

    To load one that a power cut or a full disk has cut short would end the process.
    """
    compiler = _compiler()
    sources = [source.read_bytes() for source in SOURCES + HEADERS]
    key = hashlib.sha256(b"\0".join([*sources, " ".join([*compiler, *FLAGS]).encode(), _processor().encode()]))
    folder = cache_folder() if folder is None else folder
    library = folder / f"adamw-{key.hexdigest()[:20]}.so"
    if not _is_whole(library):
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        try:
            command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", partial, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=120)
            _seal(partial)
            os.replace(partial, library)
        finally:
            Path(partial).unlink(missing_ok=True)
    return library


def _seal(library: str) -> None:
    """End a library with its own SHA-256, which loaders do not read, and bring it down to the disk."""
    with open(library, "rb+") as file:
        content = file.read()
        if not content:  # where SIGCHLD is ignored, a compiler that failed cannot be told from one that did not
            raise OSError(f"the C compiler has left {library} empty")
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == hashlib.sha256(content[:-_SEAL_BYTES]).digest()


def cache_folder() -> Path:
    """A folder that only this user can write: code and converted models are loaded from it. OSError without one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folders = Path(base) / "zenflow", Path(tempfile.gettempdir()) / f"zenflow-{os.geteuid()}"
    # One that is not absolute would be another in every working directory: so is ~ for a user without a home.
    for folder in filter(Path.is_absolute, folders):
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
