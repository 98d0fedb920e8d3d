"""Runtime: the phases of a step, and the two runners while it is in co-execution.

Takes: a step, the merged TraceGraph and the plan's segments.
Returns: the step's own results, with eager's state; traces for graph/; statistics.
Next: explain.py tells people what happened.
"""
