"""A small engine that serves a small mixture-of-experts model: the code of *The Second Send*."""
