"""``python -m laminar.cli``, the same as `laminar`: to start nodes by the interpreter's path."""

from __future__ import annotations

from laminar.cli import main

if __name__ == "__main__":
    main()
