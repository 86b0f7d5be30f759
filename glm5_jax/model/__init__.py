"""The model: functions of arrays, and one Linen module that declares parameters."""
