# SPDX-License-Identifier: Apache-2.0
"""The start-up hook: register our methods right after mergekit has imported its own.

mergekit looks for no plug-ins. `mergekit_ace.pth`, installed beside the package, imports this at
the start of every Python process, so it must cost next to nothing and must not be able to fail:
it uses only what the interpreter has loaded by then.
"""

import sys
from _thread import get_ident

HOST = "mergekit.merge_methods"


def register_quietly():
    """Register, or say in one line on stderr why not. Whatever happens, mergekit goes on."""
    try:
        from mergekit_ace.plugin import register

        register()
    except Exception as error:
        _warn(f"merge methods not registered: {type(error).__name__}: {error}")


def _warn(message):
    # Not the warnings module: under -W error it would raise into mergekit's import.
    if sys.stderr is not None:
        line = " ".join(message.split())
        print(f"mergekit-ace: warning: {line}", file=sys.stderr)


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


class HostFinder:
    """Finds the host where the other finders do, and wraps its loader."""

    def __init__(self):
        self._searching = set()  # threads that are asking the other finders

    def find_spec(self, fullname, path=None, target=None):
        if fullname != HOST or get_ident() in self._searching:
            return None
        self._searching.add(get_ident())
        try:
            return self._wrapped(fullname, path, target)
        finally:
            self._searching.discard(get_ident())

    def _wrapped(self, fullname, path, target):
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = RegisteringLoader(spec.loader)
                return spec
        return None


FINDER = HostFinder()


def install():
    """Watch for the host's import, or register at once where it has happened already."""
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
        if HOST in sys.modules:
            register_quietly()
