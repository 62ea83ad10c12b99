# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The pages for people: the blocks of code in them, and their links."""

import re
import shlex
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


class Block(NamedTuple):
    """One block of code of a page.

    Attributes:
        where: the page and the line, for example "docs/start/first_run.md:11".
        language: what stands behind the opening fence; empty for a block without a fence.
        text: what the reader sees.
        file: the name that the line above gives to the block, as in "`train.py`:", or None.
    """

    where: str
    language: str
    text: str
    file: Optional[str]

    def __str__(self):
        return self.where


def tokens(page: Path) -> list:
    """Parses a page as the site does."""
    reason = "pip install -r requirements/docs.txt"
    return pytest.importorskip("markdown_it", reason=reason).MarkdownIt().enable("table").parse(page.read_text())


def blocks() -> List[Block]:
    """Lists the blocks of code of all pages."""
    found = []
    for page in PAGES:
        before = ""
        for token in tokens(page):
            if token.type == "inline":
                before = token.content
            elif token.type in ("fence", "code_block"):
                name = re.fullmatch(r"`([\w.]+)`:", before)
                where = f"{page.relative_to(ROOT)}:{token.map[0] + 1}"
                found.append(Block(where, token.info.strip(), token.content, name and name[1]))
    return found


def commands(text: str) -> Iterator[List[str]]:
    """Yields the words of each command of a shell."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += f"{line}\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue  # A quotation goes on in the next line.
        pending = ""
        if words:
            yield words
    assert not pending, f"a quotation without an end: {pending}"


def links(page: Path) -> Iterator[str]:
    """Yields where the links and the pictures of a page lead to, within the repository."""
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target and "://" not in target and not target.startswith("#"):
                yield target


def documented() -> Dict[str, str]:
    """Returns what ``docs/reference/options.md`` says of each option, by the option's full name."""
    rows: Dict[str, str] = {}
    prefix, is_of_options = "", False
    for line in (ROOT / "docs" / "reference" / "options.md").read_text().splitlines():
        if line.startswith("#"):
            section = re.fullmatch(r"#+ Section `(\w+)`", line)
            prefix = f"{section[1]}." if section else ""
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        is_of_options = bool(cells) and (is_of_options or cells[0] == "option")
        if is_of_options and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert prefix + name not in rows, f"{prefix}{name} has two rows"
                rows[prefix + name] = cells[1]
    return rows
