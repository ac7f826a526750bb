"""The ``hybridpar`` command as a script."""

from hybridpar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
