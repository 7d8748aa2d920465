"""`zenflow-locality`: how much of the gradient few channels hold, and how long the same channels hold it."""
