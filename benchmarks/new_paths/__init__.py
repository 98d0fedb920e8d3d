"""Takes nothing but a seed.

Returns training programs that never take the same path twice, with the signature of examples/demo/gpt.py.
Next: benchmarks/bench_new_paths.py asks what coexec costs them.
"""
