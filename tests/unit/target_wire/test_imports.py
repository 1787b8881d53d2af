"""The garbage collector rests while modules are imported, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from target_wire.imports import quick_imports


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Leaves the collector as it was found."""
    yield
    gc.unfreeze()
    gc.enable()


def test_collector_rests_inside_and_what_was_made_is_left_out_of_its_rounds() -> None:
    gc.unfreeze()
    with quick_imports():
        assert not gc.isenabled()
        with quick_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_collector_works_again_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import no_such_module_anywhere  # noqa: F401, PLC0415
    assert gc.isenabled()
