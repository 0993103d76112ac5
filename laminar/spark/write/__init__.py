"""The sink: how tasks stage rows, and how the driver commits each batch once."""
