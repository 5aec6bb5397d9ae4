"""`python -m subten` is the `subten` command."""

from subten.cli import main

if __name__ == "__main__":
    main()
