"""Exercises: every starter fails, every solution passes, and no answer stops a notebook."""

import pytest

from minimodel.lesson.exercises import engine
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    UnknownExerciseError,
    Verdict,
    function_in,
    judge,
    number_in,
    right,
    wrong,
)
from minimodel.lesson.practice import NotPassedError, Practice


def count_blocks(answer):
    """A prompt of 49 tokens in blocks of 16."""
    if number_in(answer) == 3:
        return wrong("Three blocks hold 48 tokens; the last token needs one of its own.")
    return right("Rounded up: 49 / 16.") if number_in(answer) == 4 else wrong("Divide, round up.")


def grows_in_place(answer):
    notes = ["a"]
    function_in(answer)(notes, "b")
    if notes != ["a", "b"]:
        return wrong(f"After adding b to [a] the notes hold {notes}.")
    return right("One more entry, nothing copied.")


# a small made-up chapter, in the shape that a chapter's own file has
EXAMPLE = Chapter(77, "An example", [
    Exercise("77.1", "check", "Blocks", "How many blocks?", starter="answer = ...  # a number",
             check=count_blocks, hints=("49 / 16", "Round *up*."),
             solution="answer = math.ceil(49 / 16)"),
    Exercise("77.2", "code", "Grow", "Write `grow`.",
             starter="def grow(notes, entry):\n    return notes + [entry]",
             check=grows_in_place, hints=["`append`"],
             solution="def grow(notes, entry):\n    notes.append(entry)", answer="grow"),
    Exercise("77.3", "think", "Why", "Why keep notes?", solution="Reading again costs more."),
], given="import math")
ALL = [EXAMPLE, *map(engine.load_chapter, engine.chapter_numbers())]
GIVEN = {chapter.number: chapter.given for chapter in ALL}
CHECKABLE = [exercise for chapter in ALL for exercise in chapter.checkable()]
each = pytest.mark.parametrize("exercise", CHECKABLE, ids=lambda exercise: exercise.id)


def verdict_of(exercise, source):
    """Run a cell's text after the chapter's imports, as a notebook would, and judge its answer."""
    names = {"__name__": "__main__"}
    exec(GIVEN[engine.chapter_number(exercise.id)], names)
    exec(compile(source, f"<exercise {exercise.id}>", "exec"), names)
    return judge(exercise, names[exercise.answer])


@each
def test_a_starter_fails(exercise):
    verdict = verdict_of(exercise, exercise.starter)
    assert not verdict.passed and verdict.message


@each
def test_a_solution_passes(exercise):
    verdict = verdict_of(exercise, exercise.solution)
    assert verdict.passed, verdict.message


@each
@pytest.mark.parametrize("answer", [None, ..., "", [], {}, float("nan"), object(), lambda: None],
                         ids=repr)
def test_nonsense_is_told_kindly(exercise, answer):
    verdict = judge(exercise, answer)
    assert isinstance(verdict, Verdict) and not verdict.passed and verdict.message
    assert "fault of the book" not in verdict.message


@pytest.fixture
def shown():
    return []


@pytest.fixture
def practice(shown):
    def load(number):
        return EXAMPLE if number == 77 else engine.load_chapter(number)

    return Practice(load=load, show=lambda fragment: shown.append(fragment.text))


# --- hostile answers -------------------------------------------------------------------------


class Hostile:
    """Fails at whatever one does with it."""

    def _fail(self, *_):
        raise RuntimeError("hands off")

    __repr__ = __str__ = __eq__ = __bool__ = __float__ = __len__ = __iter__ = __call__ = _fail
    __hash__ = None


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("not even this")


def divides_by_zero(notes, entry):
    return 1 / 0


def leaves(notes, entry):
    raise SystemExit(3)


def stopped(notes, entry):
    raise KeyboardInterrupt


def endless(notes, entry):
    return endless(notes, entry)


def unspeakable(notes, entry):
    raise UnspeakableError


@pytest.mark.parametrize(("answer", "said"), [
    (divides_by_zero, "ZeroDivisionError: division by zero"),
    (leaves, "SystemExit: 3"),
    (stopped, "never ends"),
    (endless, "RecursionError"),
    (unspeakable, "UnspeakableError"),
    (lambda: None, "TypeError"),
    (Hostile(), "RuntimeError: hands off"),
    (42, "the function itself"),
])
def test_check_never_raises(practice, shown, answer, said):
    assert practice.check("77.2", answer) is False
    assert said in shown[-1]


def test_an_error_names_the_readers_own_line(practice, shown):
    practice.check("77.2", divides_by_zero)
    assert "of `divides_by_zero`, `return 1 / 0`" in shown[-1]


def test_a_hostile_number_is_no_number(practice, shown):
    assert practice.check("77.1", Hostile()) is False
    assert "A number is asked for here; this is a Hostile." in shown[-1]


def test_a_check_without_a_verdict_is_the_books_fault():
    broken = Exercise("1.1", "check", "t", "p", "answer = 1", lambda a: a, ("h",), "answer = 2")
    assert "a fault of the book" in judge(broken, 1).message


# --- the reader's side -----------------------------------------------------------------------


def test_check_returns_and_shows_a_verdict_that_teaches(practice, shown):
    assert practice.check("77.1", 3) is False
    assert shown[-1] == (
        "✗ Not yet (77.1). Three blocks hold 48 tokens; the last token needs one of its own."
    )
    assert practice.check("77.1", 4) is True
    assert shown[-1] == "✓ Right (77.1). Rounded up: 49 / 16."


def test_hints_come_one_at_a_time(practice, shown):
    for _ in range(4):
        practice.hint("77.1")
    assert shown[0] == "Hint 1 of 2. 49 / 16"
    assert shown[1].startswith("Hint 2 of 2.")
    assert shown[2] == shown[3] and 'solution("77.1")' in shown[2]


def test_solution_shows_the_source(practice, shown):
    practice.solution("77.2")
    assert "notes.append(entry)" in shown[-1]
    practice.solution("77.3")
    assert shown[-1] == "Reading again costs more."


def test_grade_raises_until_all_is_solved(practice, shown):
    with pytest.raises(UnknownExerciseError, match=r"grade\(5\)"):
        practice.grade()
    practice.check("77.1", 4)
    with pytest.raises(NotPassedError, match=r"chapter 77: 1 of 2 solved; still open: 77\.2"):
        practice.grade()
    practice.check("77.2", list.append)
    practice.grade()
    assert shown[-1] == "Chapter 77: all 2 exercises are solved."


def test_the_last_verdict_counts(practice):
    practice.check("77.1", 4)
    practice.check("77.2", list.append)
    practice.check("77.1", 5)
    with pytest.raises(NotPassedError, match=r"still open: 77\.1"):
        practice.grade(77)


def test_open_questions_are_not_graded(practice, shown):
    assert practice.check("77.3", "because") is True
    assert "model answer" in shown[-1]
    assert practice.check("77.3", ...) is False


def test_a_task_lives_on_a_static_page(practice):
    page = practice.exercise("77.1")
    assert page.html.count("<details") == 3
    assert "Round <em>up</em>." in page.html
    assert "<script" not in page.html
    assert "Exercise 77.1. Blocks" in page.text and "//" not in page.text    # no spoiler


@pytest.mark.parametrize(("id", "said"), [
    ("77.9", "chapter 77 has no exercise 77.9; it has: 77.1, 77.2, 77.3"),
    ("78.1", "chapter 78 has no exercises; the chapters that have some: "),
    ("seven", "'seven' names no exercise"),
    (77.1, "77.1 names no exercise"),
])
def test_an_unknown_id_names_those_that_exist(practice, id, said):
    for ask in (practice.exercise, practice.hint, practice.solution):
        with pytest.raises(UnknownExerciseError) as caught:
            ask(id)
        assert said in str(caught.value)
    with pytest.raises(UnknownExerciseError):
        practice.check(id, 1)


def test_the_readers_cell_is_the_starter_and_its_check():
    assert EXAMPLE["77.1"].cell == 'answer = ...  # a number\n\ncheck("77.1", answer);'


# --- what an author cannot get wrong ---------------------------------------------------------

GOOD = {"id": "1.1", "kind": "check", "title": "t", "prompt": "p", "starter": "answer = 1",
        "check": count_blocks, "hints": ("h",), "solution": "answer = 4"}


@pytest.mark.parametrize("change", [
    {"id": "1"}, {"id": "one.1"}, {"kind": "quiz"}, {"prompt": " "}, {"solution": ""},
    {"check": None}, {"starter": ""}, {"hints": ()}, {"kind": "think"},
])
def test_a_faulty_exercise_is_refused(change):
    Exercise(**GOOD)
    with pytest.raises(ValueError, match="exercise"):
        Exercise(**(GOOD | change))


def test_a_faulty_chapter_is_refused():
    exercise = Exercise(**GOOD)
    with pytest.raises(ValueError, match="two exercises with one id"):
        Chapter(1, "t", [exercise, exercise])
    with pytest.raises(ValueError, match=r"cannot hold 1\.1"):
        Chapter(2, "t", [exercise])
