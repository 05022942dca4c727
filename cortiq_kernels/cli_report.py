"""`cortiq report RUN.jsonl`: the page of a run, made again from its log."""

from __future__ import annotations

import os
from pathlib import Path

from cortiq_kernels.arguments import Parser
from cortiq_kernels.recipes.errors import refuse
from cortiq_kernels.recipes.outputs import check_page, page_path, write_file
from cortiq_kernels.report.page import page
from cortiq_kernels.report.runlog import read_log


def main(argv: list[str]) -> int:
    """Command line; returns the exit status. InputError (or LogError) when there is nothing to make a page of."""
    parser = Parser("cortiq report", "Make a run's page (HTML) from its log.")
    parser.add_argument("log", metavar="RUN.jsonl", help="a run log")
    parser.add_argument("--out", metavar="PAGE.html", help="where to write; default beside the log, RUN.html")
    args = parser.parse_args(argv)
    log = Path(args.log)
    if not args.log or args.out == "":
        raise refuse("cortiq report", "an empty path", "a run log, and a place for its page", "Check the variable.")
    if not log.is_file():
        got = "a directory" if log.is_dir() else "no such file"
        raise refuse(f"cortiq report {log}", got, "a run log (JSONL)", "A run writes it to OUT.log.jsonl, or to --log.")
    out = Path(args.out) if args.out else page_path(log)
    assert out is not None  # the log is a file
    if os.path.realpath(out) == os.path.realpath(log):
        raise refuse("cortiq report: out", f"the log itself ({str(out)!r})", "another file", "Set --out.")
    check_page("cortiq report: out", out, "Set --out to another place.")
    print(f"wrote {write_page(log, out)}")
    return 0


def write_page(log: Path, out: Path) -> Path:
    """Write the page of `log` to `out`, beside and renamed. Raises LogError for a file that is no run log."""
    text = page(read_log(log))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, text)
    return out
