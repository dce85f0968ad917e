"""Formulas as MathML, which browsers draw by themselves: no script and no network is needed."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import SphinxError
from sphinx.writers.html5 import HTML5Translator


def converted(node: nodes.Element, block: bool) -> str:
    """Return a formula, or in a block one for each of its paragraphs, as MathML."""
    try:
        return "\n".join(tex2mathml(tex.strip(), as_block=block) for tex in node.astext().split("\n\n"))
    except MathError as error:
        raise SphinxError(f"{node.astext()!r} is not a formula: {error}") from error


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line of text."""
    translator.body.append(converted(node, block=False))
    raise nodes.SkipNode


def block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write formulas on lines of their own."""
    translator.body.append(f'<div class="formula">{converted(node, block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer; conf.py chooses it."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
