# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging for mergekit.

Importing this package makes `merge_method: ace` known to mergekit, now or as soon as mergekit is
imported; `mergekit_ace.pth` does that at the start of every Python process. So this file is all
that such a start may cost: everything else, the names below too, is loaded on first use.
"""

import sys

__version__ = "0.1.0"

__all__ = [
    "AceOptions",
    "IllConditionedError",
    "MatrixRecord",
    "TensorRecord",
    "__version__",
    "merge_matrix",
    "merge_tensor",
    "register",
]

_HOMES = {
    "AceOptions": "algebra.ace",
    "IllConditionedError": "algebra.task_vectors",
    "MatrixRecord": "algebra.task_vectors",
    "TensorRecord": "algebra.task_vectors",
    "merge_matrix": "algebra.ace",
    "merge_tensor": "algebra.ace",
    "register": "plugin",
}

TYPE_CHECKING = False  # typing itself would cost every Python process its import
if TYPE_CHECKING:
    from mergekit_ace.algebra.ace import AceOptions, merge_matrix, merge_tensor
    from mergekit_ace.algebra.task_vectors import IllConditionedError, MatrixRecord, TensorRecord
    from mergekit_ace.plugin import register


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _warn(what, error):
    """Say in one line on stderr what does not work; where there is no stderr, say nothing."""
    try:
        # Not the warnings module: under -W error it would raise into somebody else's import.
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if sys.stderr is not None:
            sys.stderr.write(f"mergekit-ace: warning: {what}: {message}\n")
    except Exception:
        pass


def _quietly(call):
    """Return what a call returns; None, and a line on stderr, if it fails.

    Whatever state this package is in, half upgraded or being removed, mergekit goes on without it.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _warn("merge methods not registered", error)
        return None


class _HostFinder:
    """On `sys.meta_path`: lets every import pass but that of mergekit's merge methods."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "mergekit.merge_methods":
            return None

        def find():
            from mergekit_ace._autoload import find_host

            return find_host(cls, path, target)

        return _quietly(find)


def _register():
    from mergekit_ace._autoload import register_quietly

    register_quietly()


sys.meta_path.insert(0, _HostFinder)
if "mergekit.merge_methods" in sys.modules:
    _quietly(_register)
