"""Benchmarks: `python -m bench.run` for ops, `python -m bench.step` for a whole training step.

geometries.py   the published sizes that are measured, and a small one for CPUs
registry.py     what an op must say to be measured; one file an op in ops/
verify.py       the correctness gate: no speed is reported where it is red
floor.py        what this device can do at best, measured in the same run
timing.py       device events, CUDA-graph replay, host clock
peers.py        the same work through torch.compile and other people's kernels
report.py       the table, the JSON, and the environment that belongs to every figure
"""
