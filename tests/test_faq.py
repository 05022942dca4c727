"""docs/faq.md quotes what the program says: every quoted message is still in the source, `...` standing for a value."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAQ = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
#: quoted in headings, but said by other programs, the shell, or a chat template, or names of keys and files
OTHERS = {
    "HeaderTooLarge", "torch_dtype", "mtp.*", "\\r", "--batch", "--data <(...)", "NaN",
    "System message must be at the beginning.",
}  # fmt: skip


def spoken() -> str:
    """Every string of the package's source, values replaced by `...`, adjacent ones joined as Python joins them."""
    found = []
    for path in (ROOT / "cortiq_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quotes() -> list[str]:
    """The code spans of every bold heading."""
    headings = re.findall(r"\*\*(.+?)\*\*", FAQ, re.S)
    return [q.replace("\n", " ") for h in headings for q in re.findall(r"`([^`]+)`", h)]


def test_quoted_messages_are_still_said():
    said = spoken()
    assert len(quotes()) > 30
    for quote in quotes():
        if quote in OTHERS:
            continue
        pieces = [p.strip(" '`;:.,()") for p in quote.split("...")]
        lost = [p for p in pieces if len(p) > 2 and p not in said]
        assert not lost, f"docs/faq.md quotes {quote!r}; {lost} is said nowhere"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", FAQ):
        assert (ROOT / "docs" / target).is_file(), target
