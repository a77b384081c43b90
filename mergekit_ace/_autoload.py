# SPDX-License-Identifier: Apache-2.0
"""Register our methods right after mergekit has imported its own.

mergekit looks for no plug-ins. `mergekit_ace.pth`, installed beside the package, imports the
package at the start of every Python process, which puts a finder on `sys.meta_path`; when
mergekit's merge methods are imported, that finder calls `find_host` here. Nothing of this may be
able to fail.
"""

import sys
from _thread import get_ident

from mergekit_ace import _quietly

HOST = "mergekit.merge_methods"

_searching = set()  # threads that are asking the other finders


def register_quietly():
    """Register, or say in one line on stderr why not. Whatever happens, mergekit goes on."""
    _quietly(_register)


def _register():
    from mergekit_ace.plugin import register

    register()


class RegisteringLoader:
    """Stands in for the host's loader until the host has been executed."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register_quietly()


def find_host(asking, path=None, target=None):
    """The host's spec as the other finders have it, its loader wrapped; None if there is none.

    `asking` is the finder that calls; it is not asked again, nor is it from another finder that
    asks all others in turn.
    """
    if get_ident() in _searching:
        return None
    _searching.add(get_ident())
    try:
        for finder in list(sys.meta_path):
            if finder is asking or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(HOST, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    # It does not inherit from Loader, whose module would have to be imported.
                    spec.loader = RegisteringLoader(spec.loader)  # pyright: ignore
                return spec
        return None
    finally:
        _searching.discard(get_ident())
