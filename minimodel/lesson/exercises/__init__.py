"""The exercises: the engine, and one file for each chapter (`chapter_05.py`: 5.1, 5.2 ...)."""
