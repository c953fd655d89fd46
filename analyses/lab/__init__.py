"""Small models trained from scratch that differ in nothing but the norm.

What every line of work shares lies here: the models (`transformer`, `norms`), how they are trained (`training`,
`text_task`, `run_folder`), several runs of one experiment (`runs`), its tables and intervals (`results`), and the
experiments by name (`experiments`). A folder each holds a line of work; `published/` what `ln-probe lab run` found.
"""
