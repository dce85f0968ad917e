"""Settings of the documentation; `make docs` builds it."""

import gc
import inspect
import sys
from pathlib import Path
from typing import get_type_hints

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE / "figures"), str(HERE.parent / "src")]

import bsam  # noqa: E402

gc.disable()  # a build keeps what it makes: looking for garbage takes a tenth of its time

optimizers = [method for method in bsam.METHODS.values() if issubclass(method, bsam.SharpnessAware)]
for method in (bsam.SharpnessAware, *optimizers):  # autodoc would show the signature of __new__
    classes = [cls for cls in method.__mro__ if issubclass(cls, bsam.SharpnessAware)]
    types = {name: kind for cls in reversed(classes) for name, kind in get_type_hints(cls.__init__).items()}
    signature = inspect.signature(method.__init__ if method is bsam.SharpnessAware else method)
    own = [p.replace(annotation=types[name]) for name, p in signature.parameters.items() if name != "self"]
    method.__signature__ = signature.replace(parameters=own, return_annotation=signature.empty)

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
    ("py:class", r"(torch|numpy|pandas|collections\.abc|pathlib)\..*"),
    # annotations of functions whose packages are imported for type checks only
    ("py:class", r"go\.Figure|pd\.DataFrame|pd\.Series|PilImage|Entries|NDArray|np\.floating"),
    ("py:class", r"bsam\.lab\.data\.DatasetEntry"),  # what registers a data set, which no user makes
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
