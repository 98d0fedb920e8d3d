"""What is shown to people: the state of the machine, what the store holds and why, whether its decisions still hold.

Takes: the store, the backends' availability and the machine.
Returns: frozen data (checks, rows, timings), and from that text or a self-contained HTML page.
Next: `cli` prints it; it imports neither the runtime nor the native core.
"""
