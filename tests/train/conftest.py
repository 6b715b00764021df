"""Fixtures of the training tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def imported_objects_are_not_collected():
    """A run collects garbage twice, and this process holds a million objects of imported modules: they stay frozen.

    Also from one file to the next, since collecting them takes 0.4 s.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
