"""Entry point of ``python -m intaglio``, the command line."""

from intaglio.cli import main

if __name__ == "__main__":
    main()
