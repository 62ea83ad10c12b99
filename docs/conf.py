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
    "Start": """
What it is <self>
Map of the pages <docs/README>
Install <docs/start/install>
First run <docs/start/first_run>
Trainers <docs/start/trainers>
From FSDP2 <docs/start/from_fsdp2>
From ZeRO-3 <docs/start/from_zero3>
From 0.19.8, and back <docs/start/going_back>
Programs to copy <examples/README>
Changes <CHANGELOG>
""",
    "Recipes": """
All of an 8B model <docs/recipes/full_8b>
LoRA of a 70B model <docs/recipes/lora_70b>
Pretraining <docs/recipes/pretraining>
DPO and GRPO <docs/recipes/dpo_grpo>
Packing <docs/recipes/packing>
Several hosts <docs/recipes/several_hosts>
Measure your run <docs/recipes/measure_your_run>
Experts <docs/recipes/experts>
Long sequences <docs/recipes/long_sequences>
""",
    "Guides": """
Memory <docs/guides/memory>
Checkpoints <docs/guides/checkpoints>
Evaluate, generate <docs/guides/evaluation_and_generation>
Troubleshooting <docs/guides/troubleshooting>
""",
    "Reference": """
Options <docs/reference/options>
Models <docs/reference/models>
Other packages <docs/reference/packages>
Limits <docs/reference/limits>
""",
    "Results": """
Summary <docs/results/summary>
Tables <docs/results/tables>
Many ranks <docs/results/scale>
""",
    "Internals": """
Architecture <docs/internals/architecture>
Life of a gradient <docs/internals/life_of_a_gradient>
Glossary <docs/internals/glossary>
What was run <docs/internals/verification>
Contributing <CONTRIBUTING>
""",
}

project = "DeepSpeed with a faster ZeRO-1 and ZeRO-2"
project_copyright = "the authors of this fork of DeepSpeed"
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md", "examples/README.md"]
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
