"""Harbor (harborframework.com): its task folders, and our sandbox for its harness.

folder.py writes tasks in its format; environment.py is a class for its option
--environment-import-path, so that its agents and tasks run without Docker.
"""
