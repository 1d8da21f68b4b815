"""Cells to try your own input in, where a kernel runs: fields, a button, and what a function says.

    def answer(prompt):
        print(decode(generate_with_cache(model, encode(prompt), 50)))

    try_it(answer, prompt=text("Your prompt", "Q: red door?"), button="Ask the toy")

The function runs once a click, with the fields' values as keyword arguments; what it prints,
displays or returns appears under the button. An error appears there too, as one sentence.

Such a cell is tagged `skip-execution`: a built page has no kernel, so it shows the cell's code and
a note. A live cell needs only the chapter's imports, so that a reader can go straight to it.
Works with ipywidgets 7.7 (Colab) and 8; imported only when a cell asks for it.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence

from minimodel.lesson import palette
from minimodel.lesson.markup import Fragment, escape, in_notebook, present

BUSY = "Working ..."
NEEDS_WIDGETS = ("This cell needs ipywidgets, which is not installed here. Install it with "
                 "`pip install ipywidgets`, restart the kernel, and run the cell again.")
NEEDS_NOTEBOOK = "This works in a notebook: open the chapter in Colab or JupyterLab and run it."
_CSS = (".ss-oops{border-left:4px solid var(--ss-miss,#cf2c0d);padding:.2rem 0 .2rem .9rem;"
        "margin:.4rem 0;max-width:46rem}")

# A field makes its widget when it is asked to, so that chapters import this without ipywidgets.
Field = Callable


def text(label: str, start: str = "", rows: int = 1) -> Field:
    """A text to type, in one line or several."""
    if rows < 1:
        raise ValueError(f"rows={rows} leaves no line to type in: give 1 or more")

    def widget(widgets):
        if rows == 1:
            return widgets.Text(start, **_looks(widgets, label, column=True))
        return widgets.Textarea(start, rows=rows, **_looks(widgets, label, column=True))

    return widget


def whole(label: str, low: int, high: int, start: int) -> Field:
    """A whole number from low to high, by slider."""
    if not low <= start <= high:
        raise ValueError(f"start={start} of {label!r} is not from {low} to {high}")
    return lambda widgets: widgets.IntSlider(start, low, high, **_looks(widgets, label))


def choice(label: str, options: Sequence | Mapping, start: object) -> Field:
    """One of some options: a list, or {label: value}."""
    values = list(options.values() if isinstance(options, Mapping) else options)
    if start not in values:
        raise ValueError(f"start={start!r} of {label!r} is none of {values}")
    pairs = list(options.items()) if isinstance(options, Mapping) else list(options)
    return lambda widgets: widgets.Dropdown(options=pairs, value=start, **_looks(widgets, label))


def tick(label: str, start: bool = False) -> Field:
    """On or off."""
    return lambda widgets: widgets.Checkbox(start, indent=False, **_looks(widgets, label))


def _looks(widgets, label: str, column: bool = False) -> dict:
    """The label in full, above a text or beside anything else, as wide as a phone at most."""
    above = {"flex_flow": "column", "align_items": "stretch"} if column else {}
    return {"description": label, "style": {"description_width": "initial"},
            "layout": widgets.Layout(width="auto", max_width="34rem", height="auto", **above)}


def try_it(run: Callable, button: str = "Run", **fields: Field) -> None:
    """Show the fields and a button that calls `run` with their values.

    Raises nothing where widgets or a notebook are missing: it says so instead.
    """
    if not fields:
        raise ValueError("try_it needs a field at least, named as an argument of the function: "
                         "try_it(run, prompt=text('Your prompt'))")
    if importlib.util.find_spec("ipywidgets") is None:
        present(Fragment(_oops(NEEDS_WIDGETS), NEEDS_WIDGETS))
    elif not in_notebook():
        print(NEEDS_NOTEBOOK)
    else:
        _show_panel(run, button, fields)


def _show_panel(run: Callable, button: str, fields: Mapping[str, Field]) -> None:
    import ipywidgets
    from IPython.display import display

    boxes = {name: make(ipywidgets) for name, make in fields.items()}
    start = ipywidgets.Button(description=button, button_style="primary",
                              layout=ipywidgets.Layout(width="auto", max_width="16rem"))
    output = ipywidgets.Output()
    start.on_click(lambda _: _click(run, boxes, start, output))
    display(ipywidgets.VBox([*boxes.values(), start, output]))


def _click(run: Callable, boxes: Mapping, start, output) -> None:
    """One run: the button rests meanwhile, and the last result makes room for the next."""
    from IPython.display import clear_output

    words, start.description, start.disabled = start.description, BUSY, True
    try:
        with output:
            clear_output()
            _say(run, {name: box.value for name, box in boxes.items()})
    finally:
        start.description, start.disabled = words, False


def _say(run: Callable, values: Mapping) -> None:
    """Show what a call returns, or in one sentence why it did not."""
    from IPython.display import display

    try:
        result = run(**values)
    except (Exception, KeyboardInterrupt) as error:
        words = _sentence(error)
        present(Fragment(_oops(words), words))
    else:
        if result is not None:
            display(result)


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Stopped before it was done."
    if isinstance(error, ValueError) and str(error):
        return f"That cannot be done: {error}"
    return (f"The code of this cell failed ({type(error).__name__}: {error}). Mend it, run the "
            "cell again, and try again.")


def _oops(words: str) -> str:
    return (f"<style>{palette.css_for(_CSS)}{_CSS}</style>"
            f'<div class="ss-oops" role="status">{escape(words)}</div>')
