"""What is shown to people: the state of the machine, and what the store holds and why.

Takes: the store, the backends' availability and the machine.
Returns: frozen data (checks, rows), and from that text or a self-contained HTML page.
Next: `cli` prints it; it imports neither the runtime nor the native core.
"""
