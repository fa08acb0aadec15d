"""``python -m perdure`` is the command line."""

from perdure.runtime.cli import main

if __name__ == "__main__":
    main()
