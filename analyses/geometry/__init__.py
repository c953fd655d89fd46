"""Inside `hull`: how verdicts, margins and attainable attention are found and certified."""
