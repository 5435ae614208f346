"""``python -m fastkron_py``."""

from fastkron_py.cli.app import app

if __name__ == "__main__":
    app(prog_name="python -m fastkron_py")
