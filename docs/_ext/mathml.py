"""Formulas as MathML, which browsers draw by themselves: no script and no network is needed."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import SphinxError
from sphinx.writers.html5 import HTML5Translator


def mathml(tex: str, as_block: bool = False) -> str:
    """Return a formula as MathML, its bars set as those of a norm."""
    try:
        found = tex2mathml(tex.strip(), as_block=as_block)
    except MathError as error:
        raise SphinxError(f"{tex!r} is not a formula: {error}") from error
    # the bars are those of a norm, not of "such that"
    return found.replace('<mo stretchy="false">|</mo>', '<mo stretchy="false" lspace="0" rspace="0">|</mo>')


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line of text."""
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(translator: HTML5Translator, node: nodes.math_block) -> None:
    r"""Write a line for each paragraph. Its parts, which ``\qquad`` separates, wrap on a small screen."""
    for line in node.astext().split("\n\n"):
        parts = "".join(mathml(part, as_block=True) for part in line.split(r"\qquad"))
        translator.body.append(f'<div class="formula">{parts}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer; conf.py chooses it."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
