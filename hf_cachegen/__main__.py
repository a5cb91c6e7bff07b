"""The command ``hf-cachegen``; as a module for ``accelerate launch -m hf_cachegen``."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code of a command that the user has ended."""


def main() -> None:
    """Run the command line and exit."""
    try:
        from hf_cachegen.cli import app

        app()
    except KeyboardInterrupt:  # while it is imported or set up; later on, the app handles it
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
