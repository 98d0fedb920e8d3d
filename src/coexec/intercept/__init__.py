"""Stage 1: sees every op of a running step, below autograd and above the kernels.

Takes: the user's step, and the dispatcher through the native core that this stage builds on first use.
Returns: one op at a time, with its location and the identity of its values; placeholders in place of results.
Next: trace/, which records the ops of one iteration.
"""
