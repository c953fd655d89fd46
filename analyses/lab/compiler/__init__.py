"""C-RASP programs as transformer weights."""
