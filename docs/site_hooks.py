"""Hooks of mkdocs: pages outside of docs/, tables of benchmarks/results, links to files of the repository, formulas as MathML."""

from __future__ import annotations

import html
import json
import logging
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.markdown import table  # noqa: E402

# mkdocs counts warnings below this name, and --strict makes them errors.
LOG = logging.getLogger("mkdocs.hooks.site")

PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "releasing.md": "RELEASING.md",
}  # page of the site: file of the repository
RESULTS = "benchmarks/results"
MARKER = re.compile(r"^<!-- results: ([\w ]+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# What arithmatex makes of $...$ and $$...$$.
FORMULA = re.compile(r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL)
CODE = re.compile(r"^(?:```.*?^```$|    [^\n]*)|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Show the list of versions where mike builds one; elsewhere a page would ask for a list that is not there."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand at the top of the repository, and the plots of the results."""
    for page, path in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for plot in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"{RESULTS}/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace markers by tables, and links that leave docs/ by links that the site has."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        text = LINK.sub(link, text)  # an image in a link
        if re.match(r"[a-z]+:|#", target):
            return f"{image}[{text}]({target})"
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        return f"{image}{_target(text, path, anchor, page, config)}"

    # Code is set aside: it has brackets of its own.
    parts, begin = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(link, markdown[begin : code.start()]), code.group()]
        begin = code.end()
    markdown = "".join([*parts, LINK.sub(link, markdown[begin:])])
    return MARKER.sub(lambda found: "\n\n".join(map(_result, found[1].split())), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers show without a script."""

    def formula(found: re.Match[str]) -> str:
        return convert(html.unescape(found[2]), display="block" if found[1] == "[" else "inline")

    return FORMULA.sub(formula, content)


def _target(text: str, path: str, anchor: str, page: Page, config: MkDocsConfig) -> str:
    """A link to a file of the repository: to its page, to the repository's own site, or, where that has none, its text."""
    pages = {file: name for name, file in PAGES.items()}
    if path in pages or (path.startswith(("docs/", f"{RESULTS}/")) and not path.endswith((".csv", ".json", ".py"))):
        target = posixpath.relpath(pages.get(path, path.removeprefix("docs/")), posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({target}{'#' + anchor if anchor else ''})"
    if not (ROOT / path).exists():
        LOG.warning("%s: there is no file %s", page.file.src_uri, path)
    if config.repo_url:
        return f"[{text}]({config.repo_url}/blob/main/{path})"
    return f"`{text}`" if re.fullmatch(r"[\w./]+[./][\w.]+", text) else text


def _result(name: str) -> str:
    """A benchmark's description and its table."""
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())
    return f"### `{name}`\n\n{found['description']}\n\n<div class='results' markdown>\n\n{table(found)}\n\n</div>"
