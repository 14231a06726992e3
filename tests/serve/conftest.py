"""The packages that the tests of this room share."""

from tests.serving import store  # noqa: F401
