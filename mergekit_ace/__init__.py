# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging for mergekit.

`mergekit_ace.pth` imports this file at the start of every Python process; the finder at its end
registers our merge methods once mergekit is imported. So nothing here may fail or cost time.
"""

import sys
from _thread import get_ident

__version__ = "0.1.0"

__all__ = [
    "AceOptions",
    "IllConditionedError",
    "MatrixRecord",
    "PlusOptions",
    "TensorRecord",
    "__version__",
    "merge_tensor",
    "register",
]

_HOMES = {
    "AceOptions": "algebra.ace",
    "IllConditionedError": "algebra.task_vectors",
    "MatrixRecord": "algebra.task_vectors",
    "PlusOptions": "algebra.ace",
    "TensorRecord": "algebra.task_vectors",
    "merge_tensor": "algebra.ace",
    "register": "plugin",
}

TYPE_CHECKING = False  # without the import of typing, which costs every Python process time
if TYPE_CHECKING:
    from mergekit_ace.algebra.ace import AceOptions, PlusOptions, merge_tensor
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
        # no warning: under -W error it would raise into somebody else's import
        try:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"mergekit-ace: warning: merge methods not registered: {message}\n")
        except Exception:  # there is no stderr, or it is closed
            pass


def _register_after(loader):
    """Let a loader, once it has executed the host, register our methods."""
    execute = loader.exec_module

    def exec_module(module):
        del loader.exec_module
        execute(module)
        _register()

    loader.exec_module = exec_module


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
                        _register_after(spec.loader)
                    return spec
            return None
        finally:
            _searching.discard(get_ident())


sys.meta_path.insert(0, _HostFinder)
if _HOST in sys.modules:
    _register()
