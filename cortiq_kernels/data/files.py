"""Rows of a JSONL or parquet file, one dict each, with the line that a message can name.

JSONL is read as bytes and split on b"\\n" only, so U+2028, U+2029 and U+0085 inside a string stay inside it. A UTF-8
byte order mark, CRLF and a missing final newline change nothing. Blank lines are skipped but counted: `line` is what
an editor shows, 1-based. Parquet is recognised by its magic bytes; `line` is the row, 1-based, and null fields are
absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from cortiq_kernels import reading
from cortiq_kernels.data.record import DataError

LONGEST_LINE = 256 << 20  # bytes; a file without line ends would be read whole
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """`fields`, or `problem`: why this line has none."""

    line: int
    fields: dict[str, Any]
    problem: str | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of one file, in file order. A file that is no such file at all raises DataError at once."""
    path = Path(path)
    with _opened(path) as f:
        head = f.read(len(reading.LFS_POINTER))
    if head == reading.LFS_POINTER:
        raise DataError(f"{path}: is a Git LFS pointer; expected the records: run `git lfs pull`")
    if head[:4] == b"PAR1":
        return _parquet(path)
    if head[:2] == _GZIP:
        raise DataError(f"{path}: is compressed with gzip; expected plain JSONL: gunzip it first")
    if head[:2] in _UTF16:
        raise DataError(f"{path}: is UTF-16; expected UTF-8: convert it with `iconv -f utf-16 -t utf-8`")
    return _jsonl(path)


def _opened(path: Path) -> IO[bytes]:
    try:
        return reading.open_file(path)
    except reading.Unreadable as e:
        fix = "Name the file in it." if e.got == "a directory" else e.fix.replace("Download it again", "Check the path")
        raise DataError(f"{path}: got {e.got}; expected a .jsonl or .parquet file of records. {fix}") from None


def _jsonl(path: Path) -> Iterator[Row]:
    with _opened(path) as f:
        line = 0
        while raw := f.readline(LONGEST_LINE + 1):  # ends at b"\n" alone
            line += 1
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    f"{path}: got line {line} above {LONGEST_LINE >> 20} MiB; expected one JSON object per line. "
                    "Is it another kind of file?"
                )
            if line == 1 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            raw = raw.strip(b" \t\r\n")
            if raw:
                yield _parse(line, raw)


def _parse(line: int, raw: bytes) -> Row:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        return Row(line, {}, f"is not UTF-8 (byte {e.start} of the line is 0x{raw[e.start]:02x}); convert the file")
    try:
        fields = reading.parse_json(text, constants=False)
    except reading.Unreadable as e:
        hint, not_json = "one JSON object per line", "text that is "
        if line == 1 and raw[:1] in b"[{" and len(raw) < 3:
            hint += (
                "; this looks like one JSON document over many lines: `jq -c '.[]' file.json > file.jsonl` converts it"
            )
        if not e.got.startswith(not_json):
            return Row(line, {}, f"holds {e.got}; {e.fix[0].lower()}{e.fix[1:].rstrip('.')}")
        return Row(line, {}, f"is {e.got[len(not_json) :]}; expected {hint}")
    if isinstance(fields, list):
        return Row(line, {}, "is a JSON array; expected one object per line: `jq -c '.[]' file.json > file.jsonl`")
    if not isinstance(fields, dict):
        return Row(line, {}, f'is {shown(fields)}; expected a JSON object such as {{"text": ...}}')
    return Row(line, fields)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(
            f"{path}: is parquet, and pyarrow is not installed; `pip install 'cortiq_kernels[data]'`, or use JSONL"
        ) from e
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read as parquet ({e}); is the file complete?") from e
    return _parquet_rows(path, file, pa.ArrowException)


def _parquet_rows(path: Path, file: Any, arrow_error: type[Exception]) -> Iterator[Row]:
    line = 0
    try:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                line += 1
                yield Row(line, without_nulls(fields))
    except (arrow_error, OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path}: row {line + 1} cannot be read ({e}); is the file complete?") from e


def without_nulls(value: Any) -> Any:
    """Drop dict entries that are None, at every depth: parquet fills absent struct fields with null."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def shown(value: Any, limit: int = 60) -> str:
    """A value for an error message: repr, cut, with its type."""
    text = reading.brief(repr(value), 10 * limit)
    return f"{text if len(text) <= limit else text[: limit - 3] + '...'} ({type(value).__name__})"
