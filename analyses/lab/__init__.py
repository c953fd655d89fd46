"""Small models trained from scratch that differ in nothing but the norm.

What every line of work shares lies here: the models (`transformer`, `norms`, `arithmetic`), how they are trained
(`train`, `text_task`, `run_folder`), the experiments by name (`experiments`), their tables and intervals (`results`),
and what is kept of them (`keeping`, `primary`). A folder each holds a line of work; `published/` what
`ln-probe lab run` found.
"""
