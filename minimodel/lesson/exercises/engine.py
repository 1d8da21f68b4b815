"""Exercises: what they hold, how an answer is judged, where a chapter's are found.

A chapter's file, `chapter_05.py`, defines `CHAPTER = Chapter(5, "Notes", [...])`.
The life of an answer:

1. `find("5.2")` imports the chapter's file, on first use, and picks the exercise.
2. `judge(exercise, answer)` runs the exercise's check on the answer.
3. The check returns `right(...)` or `wrong(...)`, a sentence that teaches.
4. Whatever the answer does instead (raises, exits, is no answer) becomes a `wrong` that says so.

Starters and solutions are source text that defines one name (`answer`, or what
the exercise calls it), so that a test can run both after the chapter's `given`
imports: a starter must fail its check, a solution must pass.
"""

import importlib
import math
import pkgutil
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "check": "predict or compute",
    "code": "write or change code",
    "think": "open question",
}
_ID = re.compile(r"[1-9]\d*\.[1-9]\d*")
_PACKAGE = "minimodel.lesson.exercises"


class UnknownExerciseError(LookupError):
    """No exercise, or no chapter, has that id; the message names those that exist."""


class NotAnAnswer(Exception):     # noqa: N818 (it is the reader's, not an error of the program)
    """The answer is of the wrong kind altogether; the message says what was expected."""


@dataclass(frozen=True)
class Verdict:
    """What a check found: whether the answer is right, and a sentence that teaches."""

    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed


def right(message: str) -> Verdict:
    """The answer is right; the message says why it had to be."""
    return Verdict(True, message)


def wrong(message: str) -> Verdict:
    """The answer is not right yet; the message says what is wrong, and why."""
    return Verdict(False, message)


@dataclass(frozen=True)
class Exercise:
    """One task. `check` takes the reader's answer and returns `right(...)` or `wrong(...)`.

    prompt, hints  text with paragraphs, `code`, **strong** and *emphasis*
    starter        source text of the reader's cell, which defines the name `answer`
    solution       source text that defines the same name; a model answer in prose for "think"
    answer         the name that starter and solution define
    """

    id: str
    kind: str
    title: str
    prompt: str
    starter: str = ""
    check: Callable[[object], Verdict] | None = None
    hints: tuple[str, ...] = ()
    solution: str = ""
    answer: str = "answer"

    def __post_init__(self):
        object.__setattr__(self, "hints", tuple(self.hints))
        self._require(_ID.fullmatch(str(self.id)), "its id must read chapter.number, such as 5.2")
        self._require(self.kind in KINDS, f"its kind is {self.kind!r}, not one of {list(KINDS)}")
        self._require(self.prompt.strip() and self.solution.strip(), "it needs prompt and solution")
        if self.kind == "think":
            self._require(self.check is None, "an open question has no check")
        else:
            self._require(callable(self.check), "it needs a check")
            self._require(self.starter.strip() and self.hints, "it needs a starter and hints")

    def _require(self, holds: object, rule: str) -> None:
        if not holds:
            raise ValueError(f"exercise {self.id!r}: {rule}")

    @property
    def cell(self) -> str:
        """The reader's cell: the starter, then the call that checks it."""
        return f'{self.starter.strip()}\n\ncheck("{self.id}", {self.answer});'


class Chapter:
    """The exercises of one chapter, in the order of the page.

    given  source text of what the notebook has imported before its exercises, for
           starters and solutions that build on it, such as "import torch"
    """

    def __init__(self, number: int, title: str, exercises: list[Exercise], given: str = ""):
        self.number, self.title, self.given = number, title, given
        self.exercises = {exercise.id: exercise for exercise in exercises}
        if len(self.exercises) != len(exercises):
            raise ValueError(f"chapter {number} has two exercises with one id")
        strangers = [id for id in self.exercises if chapter_number(id) != number]
        if strangers:
            raise ValueError(f"chapter {number} cannot hold {', '.join(strangers)}")

    def __getitem__(self, id: str) -> Exercise:
        try:
            return self.exercises[id]
        except KeyError:
            known = ", ".join(self.exercises) or "none"
            message = f"chapter {self.number} has no exercise {id}; it has: {known}"
            raise UnknownExerciseError(message) from None

    def checkable(self) -> list[Exercise]:
        """The exercises that a machine can judge: all but the open questions."""
        return [exercise for exercise in self.exercises.values() if exercise.check]


# --- finding -------------------------------------------------------------------------------


def chapter_number(id: str) -> int:
    """The chapter of an exercise: the number before the dot."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise UnknownExerciseError(
            f'{id!r} names no exercise: write "chapter.number", such as "5.2"'
        )
    return int(id.split(".")[0])


def chapter_numbers() -> list[int]:
    """The chapters that have a file of exercises."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(int(name.removeprefix("chapter_")) for name in names if "chapter_" in name)


def load_chapter(number: int) -> Chapter:
    """Import a chapter's exercises; only the chapter asked for is imported."""
    if number not in chapter_numbers():
        known = ", ".join(map(str, chapter_numbers())) or "none yet"
        message = f"chapter {number} has no exercises; the chapters that have some: {known}"
        raise UnknownExerciseError(message)
    return importlib.import_module(f"{_PACKAGE}.chapter_{number:02d}").CHAPTER


# --- judging -------------------------------------------------------------------------------


def judge(exercise: Exercise, answer: object) -> Verdict:
    """The verdict on an answer. Never raises, whatever the answer is or does."""
    if answer is None or answer is ...:
        return wrong("There is nothing to check yet: put your answer where the dots are.")
    if exercise.check is None:
        return right("An open question: compare your answer with the model answer. "
                     f'solution("{exercise.id}") shows it.')
    try:
        verdict = exercise.check(answer)
    except NotAnAnswer as error:
        return wrong(str(error))
    except KeyboardInterrupt:
        return wrong("You stopped the check before it was done. Is there a loop that never ends?")
    except BaseException as error:      # SystemExit too: an answer must not stop the notebook
        return wrong(explain(error))
    if not isinstance(verdict, Verdict):
        return wrong(f"The check of {exercise.id} gave no verdict: a fault of the book, not yours.")
    return verdict


def explain(error: BaseException) -> str:
    """A reader's error in one sentence: what was raised, and by which of the reader's lines."""
    what = type(error).__name__
    said = _text_of(error)
    problem = f"{what}: {said}" if said else what
    line = _readers_line(error)
    if line is None:
        return f"This cannot be checked as an answer here ({problem}). Read the task once more."
    return f"Your code raised {problem}. It happened here: {line}"


def _text_of(value: object) -> str:
    try:
        return str(value)[:300]
    except BaseException:       # even an error's own text may fail
        return ""


def _readers_line(error: BaseException) -> str | None:
    """The innermost line that belongs to no installed file: the reader's own, as `line 3, f`."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except BaseException:
        return None
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    if not own:
        return None
    place = f"line {own[-1].lineno} of `{own[-1].name}`"
    return f"{place}, `{own[-1].line}`" if own[-1].line else place


def _is_installed(filename: str) -> bool:
    package = str(Path(__file__).resolve().parents[2])
    libraries = ("site-packages", "dist-packages", str(Path(traceback.__file__).parent), "<frozen")
    return filename.startswith(package) or any(name in filename for name in libraries)


# --- what checks ask of an answer ----------------------------------------------------------


def number_in(answer: object) -> float:
    """The answer as a number; anything else is told so. A tensor of one element will do."""
    try:
        value = float(answer)
    except Exception:
        kind = type(answer).__name__
        raise NotAnAnswer(f"A number is asked for here; this is a {kind}.") from None
    if math.isnan(value):
        raise NotAnAnswer("A number is asked for here; this is nan, which is none.")
    return value


def function_in(answer: object) -> Callable:
    """The answer as a function; a call's result handed in by mistake is told so."""
    if not callable(answer):
        kind = type(answer).__name__
        raise NotAnAnswer(
            f"Hand in the function itself, its name without brackets; this is a {kind}."
        )
    return answer
