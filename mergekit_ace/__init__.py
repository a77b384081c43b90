# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging for mergekit.

mergekit looks for no plug-ins. `mergekit_ace.pth` imports this package at the start of every Python
process; the finder at the end of this file then registers our merge methods as soon as mergekit is
imported. So this file is all that such a start may cost, and nothing in it may fail: everything
else, the names below too, is loaded on first use.
"""

import sys
from _thread import get_ident

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


def _register():
    """Register our methods, or say in one line on stderr why not; mergekit goes on in any case."""
    try:
        from mergekit_ace.plugin import register

        register()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not the warnings module: under -W error it would raise into somebody else's import.
        try:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"mergekit-ace: warning: merge methods not registered: {message}\n")
        except Exception:  # there is no stderr, or it is closed
            pass


class _RegisteringLoader:
    """Stands in for the host's loader until the host has been executed.

    It does not inherit from Loader, whose module would have to be imported.
    """

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


_HOST = "mergekit.merge_methods"
_searching = set()  # threads that are asking the other finders, of which one may ask all again


class _HostFinder:
    """On `sys.meta_path`: lets every import pass but that of mergekit's merge methods."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != _HOST or get_ident() in _searching:
            return None
        _searching.add(get_ident())
        try:
            for finder in list(sys.meta_path):
                spec = None
                if finder is not cls and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _RegisteringLoader(spec.loader)  # pyright: ignore
                    return spec
            return None
        finally:
            _searching.discard(get_ident())


sys.meta_path.insert(0, _HostFinder)
if _HOST in sys.modules:
    _register()
