"""Takes Program: one functional aten graph with example inputs, from Dynamo or from a step's segment.
Returns Candidate: one way to run such a graph; builds artifacts in a tuner's child, loads them anywhere.
Next: tuning (measures candidates), choose (serves the winner).
"""
