"""capture.changes.user_frames: the user's line in a stack, and the line that changed something."""

from __future__ import annotations

import sys

from quintnet_compiler.capture.changes.user_frames import line_of_change, user_frame, user_line
from quintnet_compiler.guards.python_state import Change

COUNTS = {"calls": 0}


def _count() -> None:
    COUNTS["other"] = 1
    COUNTS["calls"] += 1
    COUNTS["last"] = 2


def test_the_innermost_line_that_is_the_users() -> None:
    frame = sys._getframe()
    assert user_frame(frame, ()) is frame
    assert user_line(frame, ()).startswith("test_user_frames.py:")
    assert user_frame(frame, (__file__,)) is not frame


def test_the_line_behind_which_a_change_exists() -> None:
    COUNTS["calls"] = 0
    change = Change("the count", 0, 1, lambda: COUNTS["calls"] != 0)
    line = line_of_change(_count, [change], ())
    assert line.endswith(': COUNTS["calls"] += 1')
    assert line_of_change(lambda: None, [Change("nothing", 0, 1, lambda: False)], ()) == ""
