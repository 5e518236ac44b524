from lowmem_ft.handle import Handle


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
