"""Takes one iteration as the native recorder saw it (`records.Trace`).

Returns the same trace, checked and printable.
Next: `graph` merges it into the TraceGraph.
"""
