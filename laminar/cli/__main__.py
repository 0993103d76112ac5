"""``python -m laminar.cli``: the same as `laminar`, for programs that know the interpreter's path only."""

from __future__ import annotations

from laminar.cli import main

if __name__ == "__main__":
    main()
