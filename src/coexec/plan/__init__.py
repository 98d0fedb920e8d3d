"""Takes a TraceGraph and the size of each write.

Returns an ordered list of Switch-Cases (`cases`) and the segments of their basic blocks (`segments`).
Next: `backends` compile the segments and `runtime` walks the list.
"""
