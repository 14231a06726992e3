"""From files to columns, and back: reading, mending, keeping, recording, and writing for Perfetto."""
