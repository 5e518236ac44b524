import pytest

from lowmem_ft.foundation.handle import Handle


def test_undoing_runs_in_reverse_and_only_once():
    undone = []
    handle = Handle(lambda: undone.append("first"), lambda: undone.append("second"))
    assert handle.active
    handle.remove()
    handle.remove()
    assert undone == ["second", "first"]
    assert not handle.active


def test_a_with_block_undoes_at_its_end():
    undone = []
    with Handle(lambda: undone.append(1)):
        assert not undone
    assert undone == [1]


def test_an_undo_that_fails_keeps_no_other_from_being_called():
    undone = []

    def fail(why):
        undone.append(why)
        raise RuntimeError(why)

    handle = Handle(
        lambda: undone.append("first"),
        lambda: fail("second"),
        lambda: undone.append("third"),
        lambda: fail("last"),
    )
    with pytest.raises(RuntimeError, match="second") as error:
        handle.remove()
    assert str(error.value.__context__) == "last"
    assert undone == ["last", "third", "second", "first"]
    handle.remove()
    assert len(undone) == 4
    assert not handle.active


def test_one_error_of_two_undos_is_not_its_own_context():
    error = RuntimeError("the same")

    def fail():
        raise error

    with pytest.raises(RuntimeError):
        Handle(fail, fail).remove()
    assert error.__context__ is not error
