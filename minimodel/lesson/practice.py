"""The reader's side of the exercises: `exercise`, `check`, `hint`, `solution`, `grade`.

    check("5.2", my_answer)     a verdict that teaches; returns True or False, never raises
    hint("5.2")                 one step more each time
    solution("5.2")             the book's own answer
    grade()                     raises unless the chapter's exercises are all solved
"""

from collections.abc import Callable

from minimodel.lesson import palette
from minimodel.lesson.exercises.engine import (
    KINDS,
    Chapter,
    Exercise,
    UnknownExerciseError,
    Verdict,
    chapter_number,
    judge,
    load_chapter,
)
from minimodel.lesson.markup import Fragment, escape, folded, present, prose
from minimodel.lesson.source import highlight

_CSS = (
    ".ss-exercise,.ss-verdict{border-left:4px solid var(--ss-muted,#5b6472);padding:.1rem 0 .1rem "
    ".9rem;margin:.6rem 0;max-width:46rem}"
    ".ss-exercise p,.ss-verdict p{margin:.4rem 0}"
    ".ss-exercise summary{cursor:pointer;padding:.6rem 0;color:var(--ss-muted,#5b6472)}"
    ".ss-title{font-weight:650}.ss-kind{color:var(--ss-muted,#5b6472);font-weight:400}"
    ".ss-pass{border-color:var(--ss-hit,#1f99f1)}.ss-fail{border-color:var(--ss-miss,#cf2c0d)}"
)


class NotPassedError(AssertionError):
    """Raised by `grade`: some exercise of the chapter has no right answer yet."""


class Practice:
    """One reader's progress: the last verdict on each exercise, and the hints given.

    load  finds a chapter by its number
    show  puts a fragment on the page
    """

    def __init__(self, load: Callable[[int], Chapter] = load_chapter, show: Callable = present):
        self._load, self._show = load, show
        self._verdicts: dict[str, Verdict] = {}
        self._hints_given: dict[str, int] = {}
        self._chapter: int | None = None        # the one last worked on

    def exercise(self, id: str) -> Fragment:
        """The task, with hints and solution folded beneath it."""
        return task(self._find(id))

    def check(self, id: str, answer: object) -> bool:
        """Judge an answer, say what is wrong and why, and return True or False."""
        verdict = judge(self._find(id), answer)
        self._verdicts[id] = verdict
        self._show(verdict_on(id, verdict))
        return verdict.passed

    def hint(self, id: str) -> None:
        """Show the next hint; after the last one, say where to look then."""
        exercise = self._find(id)
        given = self._hints_given.get(id, 0)
        if given == len(exercise.hints):
            self._note(f'There are no more hints for {id}. solution("{id}") shows the answer.')
            return
        self._hints_given[id] = given + 1
        self._note(f"**Hint {given + 1} of {len(exercise.hints)}.** {exercise.hints[given]}")

    def solution(self, id: str) -> None:
        """Show the book's answer: code, or a model answer to an open question."""
        exercise = self._find(id)
        self._show(Fragment(_styled(_solution_html(exercise)), exercise.solution.strip()))

    def grade(self, chapter: int | None = None) -> None:
        """Raise `NotPassedError` unless every exercise that can be checked was last answered right.

        Without a number it is the chapter last worked on in this notebook.
        """
        number = self._chapter if chapter is None else chapter
        if number is None:
            raise UnknownExerciseError(
                "no exercise was touched yet: say which chapter, as in grade(5)"
            )
        exercises = self._load(number).checkable()
        missing = [e.id for e in exercises if not self._verdicts.get(e.id)]
        if missing:
            raise NotPassedError(
                f"chapter {number}: {len(exercises) - len(missing)} of {len(exercises)} solved; "
                f"still open: {', '.join(missing)}"
            )
        self._note(f"Chapter {number}: all {len(exercises)} exercises are solved.")

    def _find(self, id: str) -> Exercise:
        number = chapter_number(id)
        exercise = self._load(number)[id]
        self._chapter = number
        return exercise

    def _note(self, text: str) -> None:
        body = f'<div class="ss-exercise">{prose(text)}</div>'
        self._show(Fragment(_styled(body), text.replace("**", "")))


def task(exercise: Exercise) -> Fragment:
    """An exercise as a page shows it. Nothing in it needs a kernel."""
    hints = "".join(
        folded(f"Hint {count}", prose(text), "ss-hint")
        for count, text in enumerate(exercise.hints, start=1)
    )
    body = (
        f'<div class="ss-exercise"><p class="ss-title">Exercise {exercise.id}. '
        f'{escape(exercise.title)} <span class="ss-kind">({KINDS[exercise.kind]})</span></p>'
        f"{prose(exercise.prompt)}{hints}"
        f"{folded('Solution', _solution_html(exercise), 'ss-solution')}</div>"
    )
    heading = f"Exercise {exercise.id}. {exercise.title} ({KINDS[exercise.kind]})"
    return Fragment(_styled(body), f"{heading}\n\n{exercise.prompt.strip()}")


def verdict_on(id: str, verdict: Verdict) -> Fragment:
    """A verdict as a page shows it: a word, a sign and a colour, never the colour alone."""
    word, css_class = ("✓ Right", "ss-pass") if verdict.passed else ("✗ Not yet", "ss-fail")
    body = (
        f'<div class="ss-verdict {css_class}" role="status"><p class="ss-title">{word} '
        f'<span class="ss-kind">({id})</span></p>{prose(verdict.message)}</div>'
    )
    return Fragment(_styled(body), f"{word} ({id}). {verdict.message}")


def _solution_html(exercise: Exercise) -> str:
    if exercise.kind == "think":
        return f'<div class="ss-exercise">{prose(exercise.solution)}</div>'
    return highlight(exercise.solution)


def _styled(body: str) -> str:
    return f"<style>{palette.css_for(_CSS)}{_CSS}</style>{body}"


_practice = Practice()
exercise = _practice.exercise
check = _practice.check
hint = _practice.hint
solution = _practice.solution
grade = _practice.grade
