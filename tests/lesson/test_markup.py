"""Words become safe HTML."""

import pytest

from minimodel.lesson import markup


def test_prose_has_paragraphs_code_and_stress():
    html = markup.prose("One `a * b * c`\nline, **two**.\n\nA *third* & <last>.")
    assert html == (
        "<p>One <code>a * b * c</code> line, <strong>two</strong>.</p>"
        "<p>A <em>third</em> &amp; &lt;last&gt;.</p>"
    )


def test_arithmetic_is_not_stress():
    assert markup.prose("2 * 3 * 4") == "<p>2 * 3 * 4</p>"


@pytest.mark.parametrize("alt", ["", "  \n", None, 7])
def test_alternative_text_is_never_optional(alt):
    with pytest.raises(ValueError, match="alternative text"):
        markup.require_alt(alt, "figure")


def test_fragments_print_their_text_outside_notebooks(capsys):
    markup.present(markup.Fragment("<b>x</b>", "plain x"))
    assert capsys.readouterr().out == "plain x\n"


def test_fingerprints_depend_on_content_alone():
    assert markup.fingerprint("a") == markup.fingerprint("a") != markup.fingerprint("b")
    assert markup.fingerprint("a")[0].isalpha()     # a valid id for CSS selectors
