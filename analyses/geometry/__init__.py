"""How verdicts, margins and attainable attention of keys are computed and certified; `api` is the entry."""
