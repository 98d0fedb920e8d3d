"""Takes SegmentSpec: one straight-line segment of a step, with live inputs to check against.
Returns Artifact: a verified shared library in the cache, or a Failure with its reason.
Next: runtime (the GraphRunner runs replay until an artifact is adopted).
"""
