"""An interactive figure without a kernel: frames drawn beforehand, and a slider through them.

It lives in the book's pages, in JupyterLab, in Colab's frames and in slides,
offline too: each output carries its own style and script. Nothing moves by
itself, so there is nothing to switch off for readers who prefer less motion.
"""

from collections.abc import Sequence

from minimodel.lesson import palette
from minimodel.lesson.markup import escape, fingerprint, require_alt

_CSS = (
    ".ss-stepper{margin:.6rem 0;max-width:100%}"
    ".ss-bar{display:flex;gap:.5rem;align-items:center;max-width:480px}"
    ".ss-bar input{flex:1;min-width:0;height:44px;margin:0;accent-color:var(--ss-prefill,#2b6ab1)}"
    ".ss-bar button{font:inherit;width:44px;height:44px;border:1px solid currentColor;"
    "border-radius:8px;background:none;color:inherit;cursor:pointer;touch-action:manipulation}"
    ".ss-bar button:disabled{opacity:.35;cursor:default}"
    ".ss-stepper output{display:block;margin:.2rem 0 .5rem;font-variant-numeric:tabular-nums}"
    ".ss-frame{overflow-x:auto}.ss-frame[hidden]{display:none}.ss-frame svg{display:block}"
    "@media print{.ss-bar,.ss-stepper output,.ss-frame{display:none}"
    ".ss-frame:first-child,.ss-frame:last-child{display:block!important}"
    ".ss-frame::before{content:attr(data-label);font-weight:bold}}"
)
# Arrow keys are handled here and go no further: JupyterLab and slides would take them.
_JS = """document.querySelectorAll("#%s").forEach(function(r){
var f=r.querySelectorAll(".ss-frame"),s=r.querySelector("input"),o=r.querySelector("output"),
b=r.querySelectorAll("button"),n=f.length-1;
function go(i){i=Math.max(0,Math.min(n,i));f.forEach(function(e,j){e.hidden=j!==i});
s.value=i;var l=f[i].dataset.label;s.setAttribute("aria-valuetext",l);
if(o.textContent!==l)o.textContent=l;b[0].disabled=i===0;b[1].disabled=i===n}
s.oninput=function(){go(+s.value)};
b[0].onclick=function(){go(+s.value-1);if(b[0].disabled)b[1].focus()};
b[1].onclick=function(){go(+s.value+1);if(b[1].disabled)b[0].focus()};
r.onkeydown=function(e){if(e.altKey||e.ctrlKey||e.metaKey)return;var v=+s.value,
k={ArrowLeft:v-1,ArrowDown:v-1,ArrowRight:v+1,ArrowUp:v+1,Home:0,End:n}[e.key];
if(k!==undefined&&e.target.closest(".ss-bar")){e.preventDefault();e.stopPropagation();go(k)}};
go(+s.value)})"""


class Stepper:
    """Frames and a slider through them.

    frames  SVG or HTML texts, or figures (anything with an `svg()` of its own)
    labels  one for each frame, read out as the slider moves
    name    what the slider chooses, such as "tokens written"
    alt     what a reader learns by moving it; never empty
    """

    def __init__(self, frames: Sequence, labels: Sequence, name: str, alt: str):
        self.frames = [frame if isinstance(frame, str) else frame.svg() for frame in frames]
        self.labels = [str(label) for label in labels]
        self.name, self.alt = name, require_alt(alt, "stepper")
        if len(self.frames) != len(self.labels):
            raise ValueError(
                f"{len(self.frames)} frames but {len(self.labels)} labels; give one label a frame"
            )
        if len(self.frames) < 2:
            raise ValueError(f"{len(self.frames)} frames: a slider needs two at least")

    def _repr_html_(self) -> str:
        frames = "".join(
            _frame(label, content, hidden=i > 0)
            for i, (label, content) in enumerate(zip(self.labels, self.frames, strict=True))
        )
        body = f"{self._controls()}<div>{frames}</div>"
        # the same content has the same id, in every build
        name = fingerprint(body + self.alt)
        style = f"<style>{palette.css_for(body + _CSS)}{_CSS}</style>"
        return (
            f'{style}<figure class="ss-stepper" id="{name}" aria-label="{escape(self.alt)}">'
            f"{body}</figure><script>{_JS % name}</script>"
        )

    def __repr__(self) -> str:
        return f"[interactive figure: {self.alt} ({len(self.frames)} steps)]"

    def _controls(self) -> str:
        name = escape(self.name)
        return (
            '<div class="ss-bar">'
            f'<button type="button" aria-label="previous: {name}" disabled>&#8592;</button>'
            f'<input type="range" min="0" max="{len(self.frames) - 1}" value="0" step="1" '
            f'aria-label="{name}">'
            f'<button type="button" aria-label="next: {name}">&#8594;</button></div>'
            f'<output aria-live="polite">{escape(self.labels[0])}</output>'
        )


def _frame(label: str, content: str, hidden: bool) -> str:
    state = " hidden" if hidden else ""
    return f'<div class="ss-frame" data-label="{escape(label)}"{state}>{content}</div>'
