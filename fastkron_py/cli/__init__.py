"""The command line, ``python -m fastkron_py``. Typer and rich are imported here and nowhere else."""
