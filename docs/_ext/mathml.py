"""Formulas as MathML, which browsers render without scripts or a network."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import SphinxError
from sphinx.writers.html5 import HTML5Translator


def mathml(tex: str, as_block: bool = False) -> str:
    """Return a formula as MathML."""
    try:
        markup = tex2mathml(tex.strip(), as_block=as_block)
    except MathError as error:
        raise SphinxError(f"{tex!r} is not a formula: {error}") from error
    # the bars are those of a norm, so without the space of "such that"
    return markup.replace('<mo stretchy="false">|</mo>', '<mo stretchy="false" lspace="0" rspace="0">|</mo>')


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line of text."""
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(translator: HTML5Translator, node: nodes.math_block) -> None:
    r"""Write one line per paragraph. Its parts, separated by ``\qquad``, wrap on small screens."""
    for line in node.astext().split("\n\n"):
        parts = "".join(mathml(part, as_block=True) for part in line.split(r"\qquad"))
        translator.body.append(f'<div class="formula">{parts}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer, which conf.py selects."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
