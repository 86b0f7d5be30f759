"""Harbor (harborframework.com): its task folders, and our sandbox for its harness.

folder.py writes tasks in its format, reading.py reads those of others: task_file.py and
dockerfile.py take what a box can do and name the rest. world.py plays them.
environment.py is a class for its option --environment-import-path, so that its agents
and tasks run without Docker.
"""
