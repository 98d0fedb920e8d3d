"""The subgraph database: what was compiled and measured, by which backend, and which choice won.

Takes: functionalized graphs (or canonical segment texts), measurements, decisions and artifact bytes.
Returns: keys, environments, and on lookup the decision with verified artifact files, or None with a counted reason.
Next: `tuning` fills it, `choose` and the backends read it; it imports neither them nor the runtime.
"""
