"""``python -m adaptercache.cli``, where the command is not on the path."""

from adaptercache.cli import main

if __name__ == "__main__":
    main()
