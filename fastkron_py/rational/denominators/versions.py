"""The library's own denominators: every module of this package that is named after a version has one."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from fastkron_py.rational.denominators.denominator import Denominator

_MODULES: Final = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]) if module.name.startswith("version_"))
DENOMINATORS: Final[list[Denominator]] = [import_module(f"{__package__}.{name}").DENOMINATOR for name in _MODULES]
