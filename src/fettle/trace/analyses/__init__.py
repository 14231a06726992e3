"""The questions: one file each, functions over a loaded trace that return frames."""
