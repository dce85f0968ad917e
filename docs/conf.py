"""Settings of the documentation; `make docs` builds it."""

import inspect
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parents[1] / "src")]

import bsam  # noqa: E402

for method in (bsam.SharpnessAware, *bsam.SharpnessAware.__subclasses__()):  # autodoc would show that of __new__
    signature = inspect.signature(method.__init__, eval_str=True)
    method.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

project, author, copyright = "bsam", "bsam contributors", "bsam contributors"
release = version = bsam.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton"]
extensions += ["generated_pages", "mathml"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 110
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Reference", "Differences from the paper"]
nitpick_ignore_regex = [
    # types of other projects in signatures: their inventories would have to be downloaded
    ("py:class", r"(torch|numpy|collections\.abc|pathlib)\..*"),
]

smartquotes_action = "qe"  # quotes and ellipses; no dashes, which would make a flag unusable
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"bsam {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
