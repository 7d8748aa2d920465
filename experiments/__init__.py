"""The commands of the installed package, `zenflow_experiments`."""

import os

# Read when torch is loaded. Without a GPU trainer and CPU optimizer share the cores: threads that wait must hold none.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
