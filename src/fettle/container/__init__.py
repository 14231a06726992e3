"""A container image that pins what a study was measured with, as files: its recipe, or a package to be served."""

from fettle.container.image import Image, write_image

__all__ = ["Image", "write_image"]
