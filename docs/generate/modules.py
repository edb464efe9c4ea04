"""``modules.md``: every module of the package with the first sentence of its docstring."""

from generate.markdown import PACKAGE, docstring, first_sentence, without_double_blanks, wrapped


def modules_page() -> str:
    """Every module of the package with the first sentence of its docstring, by folder."""
    lines = ["# Modules", "", "Written by `make reference` from the docstrings of `eagle_kit`."]
    for folder in [PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if path.is_dir())]:
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        package = folder / "__init__.py"
        if not package.exists():
            continue
        name = folder.relative_to(PACKAGE.parent).as_posix()
        lines += ["", f"## `{name}`", "", *wrapped(first_sentence(docstring(package)))]
        if modules:
            lines.append("")
        for path in modules:
            lines += wrapped(f"* `{path.name}`: {first_sentence(docstring(path))}", indent="  ")
    return "\n".join(without_double_blanks(lines)) + "\n"
