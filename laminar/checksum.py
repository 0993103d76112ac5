"""CRC-32C, computed by the extension module of the library `crc32c`.

The extension module is loaded without the package around it: that looks up its own version, and the imports
for this took a tenth of the start of a node or of a command.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

__all__ = ["crc32c"]

if TYPE_CHECKING:
    from crc32c import crc32c
else:

    def _loaded():
        """Return the function; that of the package, where this one has no such extension module."""
        package = find_spec("crc32c")
        spec = package and PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
        if spec is None:
            from crc32c import crc32c

            return crc32c
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.crc32c

    crc32c = _loaded()
