"""argparse for the small commands, with refusals in one line like everywhere else."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Refuses with one line on stderr, `PROG: what; expected what its --help lists.`, and status 2."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line, status 2."""
        flags = [s for a in self._actions for s in a.option_strings if s.startswith("--")]
        word = next((w for w in message.split() if w.startswith("-")), "")
        near = difflib.get_close_matches(word.partition("=")[0], flags, 1)
        hint = f" Did you mean {near[0]}?" if near and near[0] != word else ""
        text = f"{self.prog}: got {message}; expected what {self.prog} --help lists.{hint}"
        print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), file=sys.stderr)
        sys.exit(2)
