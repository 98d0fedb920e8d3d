"""Takes traces, one per iteration (`records.Trace`).

Returns the TraceGraph that contains every path seen so far, and per trace what was new in it.
Next: `plan` turns the graph into an ordered list of Switch-Cases and cuts it into segments.
"""
