"""Networks for inference benchmarks, by family; small enough for a CPU, with the structure of the ones in use.

Takes: a name of the catalog and a batch size.
Returns: the module in eval mode with seeded weights, and example inputs.
Next: bench_inference.py and bench_serving_start.py.
"""
