"""Sphinx settings: the site that `make docs` builds. Warnings are errors there, broken links between pages included."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from trio_nsq import __version__

project = "trio-nsq"
author = "the trio-nsq authors"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "command_pages",
    "repository_pages",
    "markdown_pages",
]
exclude_patterns = ["_build", "_ext", "changes"]

html_theme = "furo"
html_title = "trio-nsq"
html_show_copyright = False
smartquotes = False  # options begin with two hyphens

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
# Decision records and pages have a title each; their first heading may be of any level below it.
suppress_warnings = ["myst.header"]

copybutton_prompt_text = "$ "

linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1).*"]
