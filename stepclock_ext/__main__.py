"""`python -m stepclock_ext` is the command `stepclock`."""

from stepclock_ext.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
