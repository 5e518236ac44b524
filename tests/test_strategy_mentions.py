"""Who knows what several processes share: ``foundation/parallel_plan.py`` alone.

Elsewhere nothing compares a strategy's name, or multiplies or divides by the number of processes: with a second axis
over the ranks, such a line would be wrong without an error.
"""

import ast
from pathlib import Path

import pytest

from lowmem_ft.foundation.knob import ENGINES

ROOT = Path(__file__).parent.parent
KNOWS = "lowmem_ft/foundation/parallel_plan.py"
NAMES = {*ENGINES}
OF_OTHER_KEYS = {"none", "fsdp"}  # too: they count beside a holder
HOLDERS = {"strategy", "engine", "named_engine"}
COUNTS = {"num_processes", "world_size", "get_world_size"}
PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def word(node):
    """Return the last name of ``config.strategy``, ``strategy`` or ``dist.get_world_size()``."""
    if isinstance(node, ast.Call):
        return word(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def within(node):
    """Yield an expression's parts, but no arguments of calls: what these are made into is the callee's matter."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.Call) or child is node.func:
            yield from within(child)


def texts(node):
    return {
        part.value for part in within(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def pairs_of(assignment):
    """Yield the targets and values of an assignment, of tuples one by one."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    for target in targets:
        both = (target, assignment.value)
        if all(isinstance(one, ast.Tuple) for one in both) and len(target.elts) == len(assignment.value.elts):
            yield from zip(target.elts, assignment.value.elts, strict=True)
        else:
            yield both


def assigned(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield from pairs_of(node)


def counts_processes(node, aliases):
    return any(word(part) in COUNTS | aliases or reads_count(part) for part in within(node))


def reads_count(node):
    """Return whether this is ``run.last("num_processes")``."""
    return isinstance(node, ast.Call) and any(
        getattr(arg, "value", None) == "num_processes" for arg in node.args
    )


def found_in(source):
    """Yield the lines that compare a strategy's name, and those of products with the number of processes."""
    tree = ast.parse(source)
    listed = {word(target) for target, value in assigned(tree) if texts(value) & NAMES and not is_call(value)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.match_case)):
            said = set().union(*map(texts, ast.iter_child_nodes(node)))
            words = {word(part) for part in within(node)}
            if said & NAMES or (said & OF_OTHER_KEYS and words & HOLDERS) or words & (listed - HOLDERS):
                yield getattr(node, "lineno", None) or node.pattern.lineno
    for scope in [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))] + [
        tree
    ]:
        aliases = {
            word(target)
            for target, value in assigned(scope)
            if isinstance(target, ast.Name)
            and counts_processes(value, set())
            and isinstance(scope, ast.FunctionDef)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.BinOp) and isinstance(node.op, PRODUCTS):
                operands = [node.left, node.right]
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, PRODUCTS):
                operands = [node.target, node.value]
            else:
                operands = node.args if isinstance(node, ast.Call) and word(node) == "divmod" else []
            if any(not is_text(operand) and counts_processes(operand, aliases) for operand in operands):
                yield node.lineno


def is_call(node):
    return isinstance(node, ast.Call)


def is_text(node):
    return isinstance(node, (ast.Constant, ast.JoinedStr))


def test_no_other_file_compares_a_strategy_or_multiplies_by_the_number_of_processes():
    paths = [path for folder in ("lowmem_ft", "scripts") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): sorted({*found_in(path.read_text())}) for path in paths}
    assert len(lines) > 700
    assert len(lines.pop(KNOWS)) > 5
    assert not {f"{path}:{line}" for path, found in lines.items() for line in found}


@pytest.mark.parametrize(
    "source",
    [
        "config.strategy == 'fsdp2'",
        "strategy not in (None, 'none')",
        "x = 1 if strategy in ('ddp', other) else 0",
        "_PARTS = ('fsdp2', 'zero3')\nconfig.strategy in _PARTS",
        "match strategy:\n case 'zero2': pass",
        "rows // ranks.num_processes",
        "batch * (config.num_processes or 1)",
        "rows %= num_processes",
        "divmod(rows, dist.get_world_size())",
        "def of(config):\n n, m = config.num_processes or 1, 1\n return rows / n",
        "price * run.last('num_processes')",
    ],
)
def test_it_sees_each_way_to_write_one(source):
    assert [*found_in(source)]


@pytest.mark.parametrize(
    "source",
    [
        "adapter.name != 'none'",
        "key in effect.engines",
        "config.plan(num_processes).shares_state and 2 * x",
        "Effect(engines=('ddp',))",
        "config.num_processes > 1",
        "plan.in_all(each) * 2",
    ],
)
def test_what_it_leaves_alone(source):
    assert not [*found_in(source)]
