"""agent/log_lines.py: what others send cannot write lines of our log."""

from __future__ import annotations

import logging

import pytest

from agent.log_lines import LineFormatter, printable


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain größe ✓", "plain größe ✓"),
        ("a\nERROR x", "a\\nERROR x"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\udcff", "\\udcff"),
        ("\u2028\u202e", "\\u2028\\u202e"),
    ],
)
def test_a_text_of_others_becomes_one_line(text: str, line: str) -> None:
    assert printable(text) == line


def test_a_message_is_one_line_and_a_traceback_of_ours_stays_readable() -> None:
    record = logging.LogRecord("agent.x", logging.INFO, __file__, 1, "model=%s", ("a\nb",), None)
    assert LineFormatter().format(record).endswith(" INFO agent.x: model=a\\nb")
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("agent.x", logging.ERROR, __file__, 1, "bug", (), (ValueError, error, None))
    assert LineFormatter().format(record).splitlines()[1:] == ["ValueError: x"]
