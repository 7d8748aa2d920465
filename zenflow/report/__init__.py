"""`zenflow-report`: tables and pictures from the folders that `zenflow-train` leaves.

`runs` reads a folder, `settings` says what differs, `names` how that is called, `figures` has the arithmetic, `split`
says which runs are compared and `study` puts them side by side; `tables` and the drawing files write. Neither torch nor
Hydra is needed; matplotlib for pictures.
"""
