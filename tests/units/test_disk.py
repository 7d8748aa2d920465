"""A disk of its own, on which what runs out is not the room for bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zenflow.bench.children import environment

SAVE = """
import os, sys
from pathlib import Path
import torch
from zenflow.checkpoint_folder import save
from zenflow.disk import DiskFullError
folder = Path(sys.argv[1])
try:
    save(folder / "saved", {"x": torch.ones(7), "y": torch.ones(7)})
except DiskFullError as error:
    print(error, os.listdir(folder))
"""


def test_a_disk_whose_inodes_are_used_up_is_told_from_one_without_room(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=8m,nr_inodes=3 none "$2"; exec "$0" -c "$1" "$2"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    if shutil.which("unshare") is None or subprocess.run([*command, "mount -t tmpfs none /mnt"]).returncode:
        pytest.skip("needs a mount namespace of its own")
    done = subprocess.run(
        [*command, mounted, sys.executable, SAVE, str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "bytes needed, 8,388,608 available; of 3 inodes 2 are free" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("[]\n")
