"""What tests of fleets share."""

from serve.browsing import browser  # noqa: F401
