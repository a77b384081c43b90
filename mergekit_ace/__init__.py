# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging for mergekit.

Importing this package makes `merge_method: ace` known to mergekit, now or as soon as mergekit is
imported; `mergekit_ace.pth` does that at the start of every Python process. The names below are
loaded on first use, because that start must not load torch.
"""

from mergekit_ace import _autoload

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
    "AceOptions": "algebra.options",
    "IllConditionedError": "algebra.closed_form",
    "MatrixRecord": "algebra.ace",
    "TensorRecord": "algebra.layouts",
    "merge_matrix": "algebra.ace",
    "merge_tensor": "algebra.layouts",
    "register": "plugin",
}

TYPE_CHECKING = False  # typing itself would cost every Python process its import
if TYPE_CHECKING:
    from mergekit_ace.algebra.ace import MatrixRecord, merge_matrix
    from mergekit_ace.algebra.closed_form import IllConditionedError
    from mergekit_ace.algebra.layouts import TensorRecord, merge_tensor
    from mergekit_ace.algebra.options import AceOptions
    from mergekit_ace.plugin import register


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


_autoload.install()
