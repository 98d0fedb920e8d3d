"""The fifteen programs under eager, under every way of torch.compile, and under coexec.

Takes: programs (benchmarks/programs), contenders, and how long to measure.
Returns: one JSON file per run, and a page with tables and charts that is made from it.
Next: `coexec bench`, which runs `python -m benchmarks.contest`.
"""
