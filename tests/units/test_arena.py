"""Shared memory in huge pages: where the kernel makes them, what they hold, and what is left where it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.shortages import addresses_left, mapped
from zenflow import arena as arena_module
from zenflow.arena import PAGE, Arena, huge_page_bytes

HUGE = 2 << 20
SIZE = 5 * HUGE + 3 * PAGE + 1


def mapping(address: int) -> dict[str, int]:
    """Bytes that the kernel tells of the mapping at `address`: Size, Rss, ShmemPmdMapped."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            start, end = (int(word, 16) for word in name.split()[0].split("-"))
            inside = start <= address < end
        elif inside and rest.endswith("kB"):
            found[name] = 1024 * int(rest.split()[0])
    return found


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("zenflow-test", SIZE)
    yield made
    made.close()


def test_all_of_it_is_there_and_huge_where_the_kernel_can(arena):
    if huge_page_bytes() != HUGE:
        pytest.skip(f"huge pages of {huge_page_bytes()} bytes")
    arena.array(np.uint8, 0, SIZE)[[0, HUGE, SIZE - 1]] = 7, 8, 9
    arena.populate(2)
    seen = mapping(arena.address)
    assert seen["Rss"] == -(-SIZE // PAGE) * PAGE
    assert arena.address % HUGE == 0
    values = arena.array(np.uint8, 0, SIZE)
    assert values[[0, HUGE, SIZE - 1]].tolist() == [7, 8, 9] and int(values.sum(dtype=np.int64)) == 24
    if seen["ShmemPmdMapped"] == 0:
        pytest.skip("this kernel makes no huge pages of shared memory (before 6.1, or no free memory in one piece)")
    assert seen["ShmemPmdMapped"] == 5 * HUGE


def test_who_receives_it_maps_the_same_huge_pages(arena):
    arena.populate()
    arena.array(np.int64, 0, 10)[:] = np.arange(10)
    other = Arena.attach(os.dup(arena.fd), SIZE)
    other.populate()
    assert other.array(np.int64, 0, 10).tolist() == list(range(10))
    here, there = mapping(arena.address), mapping(other.address)
    assert all(here[name] == there[name] for name in ("Size", "Rss", "ShmemPmdMapped"))
    other.close()


@pytest.mark.parametrize("why", ["no huge pages", "too slow"])
def test_without_huge_pages_all_of_it_is_there(why, monkeypatch):
    if why == "too slow":
        monkeypatch.setattr(arena_module, "HUGE_PAGE_SECONDS", 0.0)
    else:
        monkeypatch.setattr(arena_module, "huge_page_bytes", lambda: 0)
    made = Arena.create("zenflow-test", SIZE)
    made.populate()
    seen = mapping(made.address)
    assert (seen["Rss"], seen["ShmemPmdMapped"]) == (-(-SIZE // PAGE) * PAGE, 0)
    made.close()


def test_addresses_for_the_memory_alone_are_enough():
    """Also if a limit leaves none to choose a huge page's boundary among."""
    with addresses_left(SIZE + HUGE // 2):
        made = Arena.create("zenflow-test", SIZE)
    made.populate(2)
    assert mapping(made.address)["Rss"] == -(-SIZE // PAGE) * PAGE
    made.array(np.uint8, 0, SIZE)[[0, SIZE - 1]] = 7
    assert int(made.array(np.uint8, 0, SIZE).sum(dtype=np.int64)) == 14
    made.close()


def test_no_address_space_is_left_behind():
    """What the reservation has beyond the memory goes at once, the memory when it is closed."""
    before = mapped()
    made = Arena.create("zenflow-test", SIZE)
    assert mapped() - before == -(-SIZE // PAGE) * PAGE
    made.close()
    assert mapped() == before


def test_a_kernel_without_huge_pages_is_asked_once(monkeypatch, tmp_path):
    monkeypatch.setattr(arena_module, "HUGE_PAGE_FILE", tmp_path / "missing")
    huge_page_bytes.cache_clear()
    assert huge_page_bytes() == 0
    huge_page_bytes.cache_clear()
