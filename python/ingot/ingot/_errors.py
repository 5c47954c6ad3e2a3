"""Exceptions: one class a kind of status, each with the library's sentence as its text."""

from . import _core


class Error(RuntimeError):
    """A call that the library refused or that failed; str() is the library's sentence.

    Unless its name is INGOT_DRIVER, nothing was launched and nothing written.
    """

    status: int  #: the number, as in ingot.h
    name: str  #: its name, "INGOT_INVALID"

    def __init__(self, sentence, status=90):
        super().__init__(sentence)
        self.status = status
        self.name = _NAMES.get(status, "INGOT_?")

    def __reduce__(self):
        return type(self), (str(self), self.status)


class InvalidError(Error, ValueError):
    """An argument is outside what its declaration allows, or backend names nothing on this device."""


class UnsupportedError(Error, NotImplementedError):
    """A valid call that nothing on this device can run, or that the forced backend cannot."""


class OutOfMemoryError(Error, MemoryError):
    """Memory for the workspace could not be had."""


_NAMES = {number: name for name, number in _core.statuses.items()}
BY_STATUS = {
    _core.statuses["INGOT_INVALID"]: InvalidError,
    _core.statuses["INGOT_VERSION_MISMATCH"]: InvalidError,
    _core.statuses["INGOT_UNSUPPORTED"]: UnsupportedError,
    _core.statuses["INGOT_NOT_FOUND"]: InvalidError,
    _core.statuses["INGOT_OUT_OF_MEMORY"]: OutOfMemoryError,
}
