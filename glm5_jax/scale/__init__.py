"""What a program costs on chips that are not there: memory, traffic, work, time."""
