"""ZenFlow's kernels: one op, one file, each with its mathematics, Triton kernel, launcher and torch reference.

Import an op from its file (`from zenflow_kernels.gather import gather_channels`): importing the package loads neither
torch nor Triton. CUDA tensors take the kernels, CPU tensors the references; `dispatch.interpreted()` sends CPU tensors
through the kernels in Triton's interpreter (tests).
"""
