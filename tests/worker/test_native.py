"""The compiled library: built once in a private place, refused or replaced where it cannot be had, and its figures."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest

from tests.shortages import descriptors_left
from zenflow import native
from zenflow.bench import bandwidth, own_pass


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not loaded anything yet, with a cache of its own."""
    for name, value in (("library", None), ("called", False), ("told", set())):
        monkeypatch.setattr(native._Kept, name, value)
    monkeypatch.setenv("ZENFLOW_NATIVE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def test_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("ZENFLOW_NATIVE", "0")
    assert native.load() is None
    word = np.array([5], dtype=np.uint64)
    native.store_release(word.ctypes.data, 1 << 63)
    assert native.load_acquire(word.ctypes.data) == int(word[0]) == 1 << 63


def test_without_a_compiler_it_says_so_once(fresh, no_compiler, caplog):
    with caplog.at_level("WARNING", logger="zenflow"):
        assert native.load() is None
        assert native.load() is None
    (told,) = [record.message for record in caplog.records]
    assert "no C compiler" in told


@pytest.mark.parametrize("left", [0, 1, 4])
def test_a_shortage_does_not_last_longer_than_it_is_there(library, fresh, left, caplog):
    """Without descriptors nothing can be built or opened; afterwards it can."""
    word = np.array([5], dtype=np.uint64)
    with descriptors_left(left):
        assert native.load() is None
        assert native.load_acquire(word.ctypes.data) == 5
    assert "Too many open files" in caplog.text
    assert native.load() is native.load() is not None
    assert native.load_acquire(word.ctypes.data) == 5


@pytest.mark.parametrize("missing", ["switched-off", "compiler"])
def test_processors_that_do_not_order_plain_accesses_need_the_compiled_pass(fresh, no_compiler, monkeypatch, missing):
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("ZENFLOW_NATIVE", "0" if missing == "switched-off" else "1")
    with pytest.raises(RuntimeError, match=r"needs a C compiler on this machine \(aarch64\)"):
        native.load()


def test_the_cache_is_private_and_the_build_atomic(library, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native.cache_folder()
    assert folder == tmp_path / "zenflow" and folder.stat().st_mode & 0o077 == 0
    path = native.build()
    assert list(folder.iterdir()) == [path]
    stamp = path.stat().st_mtime_ns
    assert native.build() == path and path.stat().st_mtime_ns == stamp
    folder.chmod(0o777)
    assert native.cache_folder() != folder, "a folder that others can write must not be used"


def test_a_user_without_a_home_has_no_cache_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(native.tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    for cache in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setenv("HOME", "~")  # what expanduser gives where there is neither HOME nor an entry in passwd
        assert native.cache_folder().parent == tmp_path / "temporary"
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


@pytest.mark.parametrize("damage", [lambda size: 0, lambda size: size // 3, lambda size: size - 1])
def test_a_library_that_was_cut_short_is_built_anew(library, fresh, damage):
    """Loading the second of these would end the process by SIGBUS."""
    path = native.build()
    whole = path.stat().st_size
    os.truncate(path, damage(whole))
    assert native.load() is not None
    assert path.stat().st_size == whole and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_compiler_that_fails_in_any_encoding_is_done_without(library, fresh, monkeypatch, tmp_path, caplog, ignored):
    """Where SIGCHLD is ignored, as some launchers leave it, its exit code is lost."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nprintf 'unm\\366glich' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert native.load() is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ("empty" if ignored else "unm\N{REPLACEMENT CHARACTER}glich") in caplog.text
    assert list((tmp_path / "zenflow").iterdir()) == []


def test_a_failed_build_leaves_nothing(library, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "--no-such-flag"))
    with pytest.raises(native.subprocess.CalledProcessError):
        native.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_word_of_cc_is_run_and_makes_a_library_of_its_own(library, monkeypatch, tmp_path):
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/log"\nexec "$@"\n')
    wrapper.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for words in ("cc", "cc -g"):
        monkeypatch.setenv("CC", f"'{wrapper}' {words}")
        native.build(cache)
    assert (tmp_path / "log").read_text() == "cc\ncc\n"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("kind", ["SOURCES", "HEADERS"])
def test_a_changed_source_or_header_makes_a_library_of_its_own(kind, library, monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(native.SOURCES[0].parent, sources)
    for name in ("SOURCES", "HEADERS"):
        monkeypatch.setattr(native, name, tuple(sources / path.name for path in getattr(native, name)))
    before = native.build(tmp_path)
    changed = getattr(native, kind)[0]
    changed.write_text(changed.read_text() + "/* changed */\n")
    assert native.build(tmp_path) != before


def test_a_cc_that_is_no_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "'gcc")
    with pytest.raises(OSError, match=r"CC is \"'gcc\", which is no shell command"):
        native.build(tmp_path)


@pytest.mark.parametrize("streaming", [False, True, None], ids=str)
def test_the_triad_computes_what_it_says_and_gives_a_bandwidth(library, streaming):
    room = np.zeros(3 * 1024 + 16, dtype=np.float32)
    a, b, c = room[-room.ctypes.data % 64 // 4 :][: 3 * 1024].reshape(3, 1024)
    b[:], c[:] = np.arange(1024), 1000
    library.triad(a.ctypes.data, b.ctypes.data, c.ctypes.data, 1024, bool(streaming), 2)
    np.testing.assert_array_equal(a, b + 3 * c)
    assert 0 < bandwidth.triad(2, 1 << 20, streaming=streaming) < 1e5


@pytest.mark.parametrize("n_bytes", [0, 65])
def test_the_triads_size_is_whole_cache_lines(n_bytes):
    with pytest.raises(ValueError, match=f"multiple of 64, got {n_bytes}"):
        bandwidth.triad(1, n_bytes)


@pytest.mark.parametrize("dtype, per_channel", [("bfloat16", True), ("float16", False), ("float32", True)])
def test_the_pass_gives_a_bandwidth(library, monkeypatch, dtype, per_channel):
    monkeypatch.setattr(own_pass, "SIDE", 256)
    assert 0 < bandwidth.pass_bandwidth(2, 1, dtype, per_channel) < 1e5


def test_bandwidths_need_the_compiled_pass(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(RuntimeError, match="without a C compiler"):
        bandwidth.triad(1, 64)
    with pytest.raises(RuntimeError, match="without a C compiler"):
        bandwidth.pass_bandwidth(1, 1)
