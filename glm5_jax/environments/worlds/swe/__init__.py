"""Software engineering: packages with tests, made into tasks that are proven.

records.py is a task as it is stored; read it first. sources.py fetches a package,
recipes.py and toolchains.py find how its tests run, trials.py runs them in a sandbox by
the scripts of drivers.py and the files of runner/, mutate.py breaks the source,
mine.py, releases.py and patches.py make tasks, and world.py plays them. author/ asks a
model how tests run where no rule finds it. chain/ has tasks of several releases, one
after the other.
"""
