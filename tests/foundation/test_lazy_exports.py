"""Names of packages that resolve on first use."""

import importlib
import pkgutil

import pytest

import lowmem_ft


def packages():
    found = [one.name for one in pkgutil.walk_packages(lowmem_ft.__path__, "lowmem_ft.") if one.ispkg]
    return ["lowmem_ft", *(name for name in found if "lazy_exports" in source_of(name))]


def source_of(package):
    return (pkgutil.get_data(package, "__init__.py") or b"").decode()


def test_every_exported_name_of_every_package_resolves():
    found = packages()
    assert len(found) > 5
    for package in map(importlib.import_module, found):
        for name in getattr(
            package, "__all__", ()
        ):  # a room that publishes nothing has names for its own files
            assert getattr(package, name) is not None, f"{package.__name__}.{name}"


def test_another_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match=r"'lowmem_ft\.foundation\.host' has no attribute 'no_such_name'"
    ):
        importlib.import_module("lowmem_ft.foundation.host").__getattr__("no_such_name")
