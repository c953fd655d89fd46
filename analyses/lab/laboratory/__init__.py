"""docs/laboratory.md: the page of what the laboratory found, part by part."""
