"""Settings of the documentation build: ``sphinx-build -W -b html docs docs/_build/html``."""

import hybridpar

project = "hybridpar"
project_copyright = "2026, the hybridpar developers"
author = "the hybridpar developers"
version = release = hybridpar.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "examples/**"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 80

doctest_global_setup = """
import torch
import hybridpar
from hybridpar import *
"""

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"hybridpar {release}"
