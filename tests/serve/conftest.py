"""What the tests of this room share."""

from tests.serving import certified, store  # noqa: F401
