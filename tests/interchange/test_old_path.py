"""The path that `quintic.interchange` had before still works, with a warning."""

import pytest

from quintic import interchange


@pytest.mark.parametrize("name", interchange.__all__)
def test_the_old_path_warns(name: str) -> None:
    from quintic.optim import interchange as old

    with pytest.warns(DeprecationWarning, match=rf"interchange\.{name} is now quintic\.interchange\.{name};"):
        value = getattr(old, name)
    assert value is getattr(interchange, name)


def test_the_old_path_has_no_other_names() -> None:
    from quintic.optim import interchange as old

    with pytest.raises(AttributeError, match="import_stats"):
        old.import_stats  # noqa: B018
