"""Intercept: one tensor op at a time, in C++, below autograd.

Takes: the user's step, running as plain Python.
Returns: ops and Python-side events, handed to the native `Step` (csrc/step.h).
Next: trace/ describes what was recorded.
"""
