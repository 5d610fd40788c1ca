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
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_pages",
    "repository_pages",
]
exclude_patterns = ["_build", "_ext", "changes"]
nitpicky = False  # annotations name private types of libraries that have no inventory

html_theme = "furo"
html_title = "trio-nsq"
html_show_copyright = False
smartquotes = False  # options begin with two hyphens

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
# Decision records and pages have a title each; their first heading may be of any level below it.
suppress_warnings = ["myst.header"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True  # fields of named tuples are described in the class's docstring, and by autodoc, too
copybutton_prompt_text = "$ "

linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1).*"]
