"""The error of a refused request. Imports nothing heavy, so config modules and the command line can use it."""

from __future__ import annotations

from cortiq_kernels.reading import Refusal, brief


class InputError(Refusal):
    """A request that cannot be met, found before any work: one line with what, got, expected and how to fix."""


def refuse(what: str, got: object, expected: str, fix: str) -> InputError:
    """The error to raise: `what: got GOT; expected EXPECTED. FIX`."""
    return InputError(f"{brief(what, 500)}: got {brief(got, 500)}; expected {expected}. {fix}")


def need(ok: bool, what: str, got: object, expected: str, fix: str) -> None:
    """Raise `InputError` in the package's form unless `ok`."""
    if not ok:
        raise refuse(what, got, expected, fix)


class TrainingFailed(RuntimeError):
    """Training went wrong for good (too many steps with a non-finite loss or gradient); nothing was written."""
