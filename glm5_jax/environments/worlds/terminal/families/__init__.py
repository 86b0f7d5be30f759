"""The families of tasks, by name; to add one, write a maker and name it here."""

from glm5_jax.environments.worlds.terminal.draft import Family
from glm5_jax.environments.worlds.terminal.families import (
    archives,
    configuration,
    packaging,
    queries,
    repositories,
    scripts,
    text,
)

ALL = {
    "access_log": Family(text.access_log),
    "archive_without_logs": Family(archives.archive_without_logs),
    "broken_ini": Family(configuration.broken_ini),
    "broken_json": Family(configuration.broken_json),
    "checksum": Family(archives.checksum),
    "column_sums": Family(text.column_sums),
    "cron_line": Family(configuration.cron_line),
    "deb_package": Family(packaging.deb_package, ("dpkg-deb",)),
    "encoded_message": Family(archives.encoded_message),
    "git_bisect": Family(repositories.git_bisect, ("git",)),
    "git_merge": Family(repositories.git_merge, ("git",)),
    "git_revert": Family(repositories.git_revert, ("git",)),
    "json_filter": Family(queries.json_filter),
    "makefile": Family(scripts.makefile, ("make",)),
    "modes": Family(configuration.modes),
    "patch_level": Family(repositories.patch_level, ("patch",)),
    "rename_key": Family(text.rename_key),
    "script_words": Family(scripts.script_words),
    "sqlite_join": Family(queries.sqlite_join, ("python3",)),
    "symlinks": Family(archives.symlinks),
}
