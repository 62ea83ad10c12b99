# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation's site, which ``make docs`` builds with Sphinx.

The site is made of the pages that are read in the repository, README.md first: the source is the repository's root.
Sphinx checks every link of these pages to a page, a heading or a file.
"""

import html
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

CONTENTS = {
    "Adopt it": """
Start here <self>
Install and use <docs/adopting>
From FSDP2, from ZeRO-3 <docs/from_fsdp2>
Programs to copy <examples/README>
From 0.19.8, and back <docs/going_back>
Changes <CHANGELOG>
Options <docs/options>
Models <docs/models>
Other packages <docs/what_people_train_with>
""",
    "What to expect": """
A picture of a step <docs/memory_picture>
Performance <docs/performance>
Many ranks <docs/scale>
Reliability <docs/reliability>
Verification <docs/verification>
""",
    "How it works": """
Architecture <docs/architecture>
Life of a gradient <docs/life_of_a_gradient>
Glossary <docs/glossary>
""",
    "Change it": """
Contributing <CONTRIBUTING>
""",
}

project = "DeepSpeed with a faster ZeRO-1 and ZeRO-2"
project_copyright = "the authors of this fork of DeepSpeed"
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "examples/README.md"]
exclude_patterns = ["build", ".*"]

extensions = ["myst_parser"]
# Links to headings of this depth are known, under the names that GitHub gives them.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

html_title = project
html_theme = "furo"
html_css_files = ["site.css"]
# The package mermaidx has mermaid's own script as it was published, so no page asks the network for it.
html_static_path = ["site.css", str(distribution("mermaidx").locate_file("mermaidx/assets/mermaid.js"))]
html_copy_source = False
html_use_index = False


class Mermaid(Directive):
    """A drawing, which mermaid's script finds by its class and draws once the page has loaded."""

    has_content = True

    def run(self):
        drawing = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{drawing}</pre>', format="html")]


def complete(app, page, source):
    """Adds what only the site has: the list of pages, the examples' source, and titles in place of file names."""
    # A link whose text is empty shows the title of its page.
    source[0] = re.sub(r"\[[\w/]+\.md\](?=\([\w/.]+\.md)", "[]", source[0])
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n{pages}```\n"
    if page == "examples/README":
        for program in re.findall(r"\((\w+\.py)\)", source[0]):
            source[0] += f"\n## {program}\n\n```{{literalinclude}} {program}\n:language: python\n```\n"


def load_mermaid(app, page, template, context, doctree):
    if doctree and any('class="mermaid"' in raw.astext() for raw in doctree.findall(nodes.raw)):
        app.add_js_file("mermaid.js")


def add_index(app, exception):
    """Gives the first page the name under which a web server looks for it."""
    if not exception:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app):
    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", complete)
    app.connect("html-page-context", load_mermaid)
    app.connect("build-finished", add_index)
