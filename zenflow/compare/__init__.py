"""`zenflow-compare`: two engines on the same job, seed by seed, and whether the second is to be adopted.

The arithmetic (`curve`, `criteria`, `judge`, `text`) needs no torch.
"""
