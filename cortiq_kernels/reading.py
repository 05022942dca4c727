"""Files that somebody else wrote: opened only where that is safe, read only up to a limit, parsed strictly.

What `open_file` refuses, by its kind: nothing there, a symlink to nothing, a circle of symlinks, a directory, a pipe
(no wait for a writer), a socket, a device, a file that may not be read. What `parse_json` refuses beyond broken JSON: a
key that an object holds twice (readers disagree on which one counts), nesting deeper than `DEEPEST` (copying or writing
it again would exhaust the stack), a lone surrogate (no file could hold it again) and, on request, NaN and Infinity.

Everything raises `Unreadable`, whose parts complete the sentence of the layer that asked: it knows what it expected.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

#: bytes of a JSON, template or settings file; the largest real ones, tokenizers of 250k tokens, have about 20 MB
SMALL_FILE = 512 << 20
#: levels of objects and lists; published files have fewer than 10
DEEPEST = 64
_AGAIN = "Download it again."
LFS_POINTER = b"version https://git-lfs"


def brief(value: object, limit: int = 200) -> str:
    """`value` as text of about `limit` characters at most, its middle left out, for a message."""
    text = str(value)
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}... ({len(text)} characters) ...{text[-tail:]}"


#: characters of an error's text; names and values in a damaged file can be megabytes long
LONGEST_ERROR = 3000


class Refusal(ValueError):
    """Base of the package's errors about what it was given; its text is cut in the middle where it is endless."""

    def __init__(self, text: str = ""):
        super().__init__(brief(text, LONGEST_ERROR))


class Unreadable(ValueError):
    """Why a file cannot be used: `got` is what was found, `fix` what to do about it."""

    def __init__(self, got: str, fix: str = _AGAIN):
        super().__init__(f"got {got}. {fix}")
        self.got, self.fix = got, fix


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """None for a regular file (symlinks followed), else what is there, in words."""
    try:
        mode = os.stat(path).st_mode
    except OSError as e:
        return _no_file(path, e)
    except ValueError:  # a NUL in the name
        return "a name that no file can have"
    if stat.S_ISREG(mode):
        return None
    for is_kind, words in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return words
    return "a device"


def _no_file(path: str | os.PathLike[str], e: OSError) -> str:
    """What an error of `stat` or `open` means, in words."""
    if e.errno == errno.ELOOP:
        return "a circle of symlinks"
    if e.errno in (errno.EACCES, errno.EPERM):
        return "'permission denied'"
    if e.errno == errno.ENOENT:
        return "a symlink to a missing file" if os.path.islink(path) else "no such file"
    if e.errno == errno.ENOTDIR:
        return "no such file (a part of its path is no directory)"
    return f"'{(e.strerror or str(e)).lower()}'"


def _advice(got: str) -> str:
    if got == "'permission denied'":
        return "Check its owner and mode."
    if got in ("a pipe", "a device", "a socket"):
        return "Write what it gives to a file first: it is read more than once."
    if "symlink" in got:
        return "Mend the link."
    return "Check the path." if got in ("a directory", "a name that no file can have") else _AGAIN


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading; never waits for a pipe. Raises `Unreadable` (see the module docstring)."""
    got = kind_of(path)
    if got is None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            got = _no_file(path, e)
        else:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return open(fd, "rb")
            os.close(fd)
            got = "a file that was replaced while it was opened"
    raise Unreadable(got, _advice(got))


def read_file(path: str | os.PathLike[str], limit: int = SMALL_FILE, *, may_be_empty: bool = False) -> bytes:
    """The whole file. `Unreadable` also for more than `limit` bytes, for none at all, and for a Git LFS pointer."""
    with open_file(path) as f:
        size = os.fstat(f.fileno()).st_size
        try:
            raw = f.read(limit + 1) if size <= limit else b""  # + 1: it may be growing
        except OSError as e:
            raise Unreadable(f"a file that cannot be read ({e.strerror})", "Check the disk.") from None
    if max(size, len(raw)) > limit:
        got = f"{max(size, len(raw))} bytes, more than the {limit >> 20} MiB of any such file"
        raise Unreadable(got, "It is another kind of file.")
    if raw.startswith(LFS_POINTER):
        raise Unreadable(f"a Git LFS pointer ({len(raw)} bytes of text)", "Run `git lfs pull`.")
    if not raw and not may_be_empty:
        raise Unreadable("0 bytes", _AGAIN)
    return raw


def decode(raw: bytes) -> str:
    """UTF-8 text, without a byte order mark. `Unreadable` names the first byte that is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise Unreadable("UTF-16 text", "Convert it with `iconv -f utf-16 -t utf-8`.") from None
        raise Unreadable(f"byte 0x{raw[e.start]:02x} at {e.start}, which is not UTF-8", "Convert it.") from None


def read_text(path: str | os.PathLike[str], limit: int = SMALL_FILE, *, may_be_empty: bool = False) -> str:
    """`read_file`, decoded."""
    return decode(read_file(path, limit, may_be_empty=may_be_empty))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object that a file holds."""
    value = parse_json(read_text(Path(path)))
    if not isinstance(value, dict):
        raise Unreadable(f"a JSON {type(value).__name__}")
    return value


class _Repeated(ValueError):
    """A key twice in one object."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _Repeated(f"the key {brief(repr(twice), 80)} twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, which JSON does not have")


_LENIENT = json.JSONDecoder(object_pairs_hook=_pairs)
_STRICT = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_no_constant)


def parse_json(text: str, *, constants: bool = True) -> Any:
    """The JSON value in `text`; `constants` allows NaN and Infinity, which some writers use. Raises `Unreadable`."""
    try:
        value = (_LENIENT if constants else _STRICT).decode(text)
    except _Repeated as e:
        raise Unreadable(str(e), "Keep one of them.") from None
    except RecursionError:
        raise Unreadable(f"JSON nested deeper than {DEEPEST} levels", "Flatten it.") from None
    except ValueError as e:
        raise Unreadable(f"text that is not JSON ({brief(e)})") from None
    if _levels(value) > DEEPEST:
        raise Unreadable(f"JSON nested deeper than {DEEPEST} levels", "Flatten it.")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unreadable("a lone surrogate in a string", "Strings have to be valid Unicode.") from None
    return value


def _levels(value: Any) -> int:
    """Levels of objects and lists, counted to `DEEPEST` + 1, one level after the other (no recursion)."""
    n, level = 0, [value] if isinstance(value, dict | list) else []
    while level and n <= DEEPEST:
        n += 1
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v) if isinstance(c, dict | list)]
    return n
