"""The parts of a fine-tuning run: data, models, engines, the loop and what it records.

`experiments/` and `conf/` only choose among these parts; of the command line `command` alone knows.
"""
