"""`zenflow-report`: tables and pictures from the folders that `zenflow-train` leaves.

`runs` reads a folder, `settings` says what differs, `figures` has the arithmetic, `study` puts runs of one model and
data side by side; `tables` and the drawing files write. Neither torch nor Hydra is needed; matplotlib for pictures.
"""
