"""The command `coexec`: thin over the library, one file per command.

Takes: command-line words.
Returns: text or JSON on stdout, complaints on stderr, exit status 0 (fine), 1 (a problem was found) or 2 (wrong usage).
Next: nothing; nobody imports it.
"""
