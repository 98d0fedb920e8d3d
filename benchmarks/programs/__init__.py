"""Fifteen imperative training programs, CPU-sized, as a practitioner would write them: they know nothing of coexec.

Takes: a name of the catalog, a seed, and a size.
Returns: a Program: the training step, its batches, and everything that training changes.
Next: bench_programs.py, and tests/benchmarks/test_programs.py.
"""
