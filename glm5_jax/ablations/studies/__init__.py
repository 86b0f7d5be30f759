"""The studies, a file each: `get_study(scale)` returns the record of one."""
