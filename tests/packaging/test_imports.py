"""Imports among the modules of the package, those inside functions included."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_module_is_part_of_a_circle_of_imports() -> None:
    graph = grimp.build_graph("eagle_kit", exclude_type_checking_imports=True, cache_dir=None)
    imports = {}
    for module in graph.modules:
        imports[module] = graph.find_modules_directly_imported_by(module)
    assert len(imports) > 300
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
