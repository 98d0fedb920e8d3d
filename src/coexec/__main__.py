"""`python -m coexec` is the command `coexec`."""

from coexec.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
