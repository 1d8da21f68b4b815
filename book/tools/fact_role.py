"""The `{fact}` role of `.md` pages: value and unit of a claim, linked to its row in the register.

{fact}`S39` prints 890 B/token; a claim without a value prints what it says. An id that the
register does not have is a warning, and the strict build fails. Notebooks use the
function `fact` instead, since Colab would show the role as text.
"""

from importlib.resources import files

from docutils import nodes
from facts_pages import anchor
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from minimodel.lesson.facts import UnknownFactError, find


class FactRole(SphinxRole):
    """Turns an id into its claim's amount."""

    def run(self) -> tuple[list, list]:
        self.env.note_dependency(str(files("minimodel.lesson") / "facts.csv"))
        try:
            claim = find(self.text.strip())
        except UnknownFactError as error:
            logging.getLogger(__name__).warning(str(error), location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        words = claim.amount if claim.has_value else claim.quantity
        link = pending_xref("", nodes.inline("", words), refdomain="std", reftype="ref",
                            reftarget=anchor(claim.id), refexplicit=True, refwarn=True,
                            refdoc=self.env.docname)
        return [link], []


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("fact", FactRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
