"""Reports as people see them: pages and figures."""
