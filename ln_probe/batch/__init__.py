"""Reports over checkpoint suites: work units that survive being killed, on one machine or many."""
