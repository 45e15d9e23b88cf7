"""Scruple: training in 5 to 7 bytes per parameter.

This module needs no torch: it lists what the library knows. The optimizers are in scruple.torch; save and
load are for those.
"""

from ._abi import Error, UsageError, engines, formats, library, recipes, rules

Error.__module__ = UsageError.__module__ = __name__  # as tracebacks show them
__all__ = ["Error", "UsageError", "engines", "formats", "load", "recipes", "rules", "save", "version"]


def version():
    """The version of the compiled library."""
    return library.version().decode()


def __getattr__(name):
    if name == "__version__":  # asked for, not kept: importing this must not need the library
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def save(opt, model, path, *, scaler=None, notes=None):
    """Saves model and optimizer as a checkpoint, the folder `path`: completely or not at all. One that is
    there already is replaced in one step. Call it between steps; with several processes, in one of them.

    opt     an optimizer of scruple.torch, made from parameters of `model`
    scaler  a torch.amp.GradScaler (or LossScaler) whose scale goes with it
    notes   {string: string} that load gives back: the number of the epoch, a scheduler's state as JSON
    """
    from .torch import checkpoint  # here: `import scruple` works without torch

    checkpoint.save(opt, model, path, scaler=scaler, notes=notes)


def load(opt, model, path, *, scaler=None):
    """Loads a checkpoint of scruple.save, `scruple train` or `scruple checkpoint` into model and optimizer,
    and returns its notes. Of a run's folder the last checkpoint is taken. Everything is checked before
    anything is changed. Hyperparameters and seed become the saved ones; formats must be the same, and
    roundings ones that read alike ("nearest" and "wide"; of a moment any).
    """
    from .torch import checkpoint  # here: `import scruple` works without torch

    return checkpoint.load(opt, model, path, scaler=scaler)
