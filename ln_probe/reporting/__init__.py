"""The result: tables, what they say, what is kept for pictures, several reports side by side."""
