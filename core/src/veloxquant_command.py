"""The ``veloxquant`` command, outside the package so that a missing MLX back end is a sentence and no traceback."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 1 for findings, 2 for bad input, 130 when interrupted.
    """
    try:
        from veloxquant.cli import main as run
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except ImportError as error:
        if "back end" not in str(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run()
