"""An extension of griffe: headings of docstrings in the words that griffe takes."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames headings while the sources are read: "Example:" is shown as code, and a NamedTuple's arguments are its attributes."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
                obj.docstring.value = obj.docstring.value.replace("\nArgs:\n", "\nAttributes:\n")
