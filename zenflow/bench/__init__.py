"""`zenflow-bench`: step times of ZenFlow beside other trainers, the CPU optimizer's pass and the GPU kernels beside the
memory's limit.

The parent process (`command`, `step`) holds neither torch nor a GPU; every trainer runs in a fresh child (`child`).
"""
