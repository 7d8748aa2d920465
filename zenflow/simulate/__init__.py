"""Deferred rules without the engine: plain torch on one device, for rules that nobody has built yet.

`rule` says what a rule is, `matrix` has its arithmetic, `simulation` which step does what. `zenflow-train
engine=simulated` runs it. It saves no memory and no time: it answers what a rule costs in quality.
"""
