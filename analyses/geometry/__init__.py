"""How verdicts, margins and attainable attention of keys are computed and certified; see `key_geometry`."""
