"""Scruple: training in 5 to 7 bytes per parameter.

This module needs no torch: it lists what the library knows. The optimizers are in scruple.torch.
"""

from ._abi import Error, UsageError, engines, formats, library, recipes, rules

__all__ = ["Error", "UsageError", "engines", "formats", "recipes", "rules", "version"]


def version():
    """The version of the compiled library."""
    return library.version().decode()
