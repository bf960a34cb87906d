"""The rules of the architecture, read off the source tree: they hold or these tests fail.

Everything is read with ast, so a rule sees what a module says, not what an import happens to do.
"""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

from support.source_tree import (
    MODULES,
    NAMES,
    ROOT,
    at_import,
    docstrings,
    imported,
    imports,
    named,
    reached,
    top,
    words,
)

import tilewise
from tilewise.strategies import catalog

STRATEGY_MODULES = tuple(
    m for m in MODULES if m.name.startswith("tilewise.strategies.") and m.name.count(".") == 2
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What is decided before a tensor is there: import-linter's contract names it, this file reads it.
TORCH_FREE = {
    module
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract.get("forbidden_modules") == ["torch"]
    for module in contract["source_modules"]
}

PACKAGES = ("tilewise", "tilewise_verify", "tilewise_tools")
NAME_OTHERS = {  # modules of the core that may: the command, the table of names, old paths
    *("tilewise.__main__", "tilewise.lazy", "tilewise.tools", "tilewise.verification"),
}

TRITON = tuple(
    m
    for m in MODULES
    if m.name.startswith("tilewise.kernels.triton") and "triton" in top(imported(m.name))
)


def strategies() -> set[str]:
    """Names of the public strategies: functions of strategies/ that return a Plan."""
    return {
        node.name
        for module in STRATEGY_MODULES
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if node.returns is not None and ast.unparse(node.returns).strip("'\"") == "Plan"
    }


def parse_tests(pattern: str) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "tests").glob(pattern))]


def test_the_core_imports_no_verification_and_no_tools():
    """Not inside functions either, nor by a name in a string; import-linter holds the same."""
    core = [module for module in MODULES if top([module.name]) == {"tilewise"}]
    reaching = {
        module.name
        for module in core
        if top(imports(module, bodies=True)) & {*PACKAGES[1:]}
        or any(word.startswith(PACKAGES[1:]) for word in words(module.tree))
    }
    assert reaching == NAME_OTHERS
    verify = [module for module in MODULES if top([module.name]) == {"tilewise_verify"}]
    assert len(core) > 200 and len(verify) > 20
    assert not [m for m in verify if "tilewise_tools" in top(imports(m, bodies=True))]


MOST_CORE_NAMES = 40


def test_integrations_use_public_names_and_few_others():
    """Public names come by `import tilewise as tw`; other names of the core count."""
    imported_names = {
        (node.module, alias.name)
        for module in MODULES
        if module.folder in ("tilewise.integrations", "tilewise.compat")
        for node in at_import(module.tree, bodies=True, typing=True)
        if isinstance(node, ast.ImportFrom) and top([node.module or ""]) == {"tilewise"}
        if not (node.module or "").startswith("tilewise.integrations")
        for alias in node.names
    } - {("tilewise.moved", "moved")}
    assert 10 < len(imported_names) <= MOST_CORE_NAMES
    assert not {name for _, name in imported_names} & {*tilewise.__all__}


def test_torch_free_packages_reach_no_torch():
    free = [m for m in MODULES if m.folder in TORCH_FREE]
    assert free
    offenders = [
        f"{module} reaches {via}, which imports torch"
        for module in free
        for via in sorted(reached(module.name))
        if "torch" in top(imported(via))
    ]
    offenders += [
        f"{module} imports torch in a function"
        for module in free
        if not module.name.endswith(".layout") and "torch" in top(imports(module, bodies=True))
    ]
    assert not offenders


def test_modules_import_only_what_every_installation_has():
    project = PROJECT["project"]
    allowed = {*sys.stdlib_module_names, *PACKAGES}
    allowed |= {re.split(r"[^\w-]", spec)[0] for spec in project["dependencies"]}
    command_line = {
        re.split(r"[^\w-]", spec)[0] for spec in project["optional-dependencies"]["cli"]
    }
    offenders = {
        m.name: top(imported(m.name))
        - allowed
        - (command_line if m.name.startswith("tilewise_tools.cli") else set())
        for m in MODULES
        if m not in TRITON
    }
    # A class of accelerate's is the base of one of ours; nobody imports this module.
    assert offenders.pop("tilewise.integrations.transformers.accelerate") == {"accelerate"}
    assert offenders.pop("tilewise_verify.pytest_plugin") == {"pytest"}  # which imports it
    assert not {name: extra for name, extra in offenders.items() if extra}


def test_triton_is_imported_by_its_kernels_alone_and_they_by_nobody_at_import():
    names = {module.name for module in TRITON}
    assert names
    others = [module.name for module in MODULES if module not in TRITON]
    assert not {name for name in others if reached(name) & names}


def test_imports_have_no_cycles():
    """Those inside functions, and those for type checkers alone, count too.

    Of tilewise itself the latter do not: they are the names that are found when first used.
    """
    graph = {
        module.name: (imports(module, bodies=True, typing=module.name != "tilewise") & NAMES)
        - {module.name}
        for module in MODULES
    }
    TopologicalSorter(graph).prepare()


def test_what_runs_codes_knows_no_strategy():
    module = named("execution.run")
    assert not [name for name in reached(module.name) if "strategies" in name]
    # "all_gather" is a kind of collective as well, so only the function's name is forbidden.
    assert not words(module.tree) & (strategies() - {"all_gather"})
    assert not words(module.tree, strings=False) & strategies()


def test_there_are_at_most_six_opcodes():
    (union,) = (
        node.value
        for node in named("compiler.program").tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Instruction"
    )
    assert 1 <= len({n.id for n in ast.walk(union) if isinstance(n, ast.Name)}) <= 6


def test_what_runs_codes_binds_every_op():
    (union,) = (
        node.value
        for node in named("compiler.ops").tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "Op"
    )
    assert union is not None
    known = {n.value.id for n in ast.walk(union) if isinstance(n, ast.Subscript)}  # pyright: ignore
    cases = [n for n in ast.walk(named("execution.run").tree) if isinstance(n, ast.MatchClass)]
    assert {ast.unparse(n.cls).rpartition(".")[2] for n in cases} == known


def test_no_class_of_the_compiler_does_everything():
    """A feature comes in by a pass of its own, not by further methods of one class."""
    methods = {
        f"{module}.{node.name}": sum(isinstance(x, ast.FunctionDef) for x in node.body)
        for module in MODULES
        if module.name.startswith("tilewise.compiler.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    assert len(methods) > 30 and {name: n for name, n in methods.items() if n > 25} == {}


def test_one_file_at_most_reads_the_environment():
    readers = {"environ", "environb", "getenv", "getenvb"}
    assert len([str(m) for m in MODULES if words(m.tree, strings=False) & readers]) <= 1


def test_no_module_holds_mutable_state():
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    makers = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"}
    makers |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "count", "cycle"}
    arrays = {"array", "zeros", "ones", "empty", "full", "arange", "tensor", "asarray"}

    def mutable(node: ast.expr | None) -> bool:
        match node:
            case ast.Tuple(elts=parts):
                return any(mutable(part) for part in parts)
            case ast.IfExp(body=body, orelse=orelse):
                return mutable(body) or mutable(orelse)
            case ast.Call(func=ast.Name(id=maker)):
                return maker in makers
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=maker)):
                return maker in makers or (owner in ("np", "numpy", "torch") and maker in arrays)
        return isinstance(node, literals)

    offenders = []
    for module in MODULES:
        for node in at_import(module.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and mutable(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if [ast.unparse(target) for target in targets] != ["__all__"]:
                    offenders.append(f"{module}:{node.lineno}: {ast.unparse(node)[:60]}")
        walked = ast.walk(module.tree)
        offenders += [f"{module}:{n.lineno}: global" for n in walked if isinstance(n, ast.Global)]
    assert not offenders


def test_plans_are_made_for_heads_in_one_place():
    makers = {
        str(path.relative_to(ROOT / "src" / "tilewise"))
        for path in (ROOT / "src").rglob("*.py")
        if any(call in path.read_text() for call in (".tuned(", " ResolvedPass("))
    }
    assert len(makers) == 1, makers


def test_the_strategies_package_re_exports_nothing():
    package = named("strategies").tree
    assert len(package.body) == len(docstrings(package))


def test_import_is_silent_and_touches_no_device():
    program = """
import threading, torch
def refuse(*args, **kwargs): raise AssertionError("a device was touched")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
before = torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed()
import tilewise
assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed())
assert not torch.distributed.is_initialized()
assert threading.active_count() == 1
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_no_module_bears_a_public_functions_name():
    modules = {m.folder.rpartition(".")[2] for m in MODULES if m.folder.startswith("tilewise.")}
    for module in MODULES:
        if module.name == "tilewise":
            walked = at_import(module.tree, typing=True)  # names that are found later, too
            nodes = [n for n in walked if isinstance(n, ast.ImportFrom)]
            exported = {(n.module, a.asname or a.name) for n in nodes for a in n.names}
            values = {name for base, name in exported if base not in (None, "tilewise")}
            assert not values & modules


def test_every_strategy_is_in_the_catalog_and_has_its_page():
    wanted = strategies()
    listed = [entry.name for entry in (*catalog.STRATEGIES, *catalog.MASK_AWARE)]
    assert sorted(listed) == sorted(wanted)
    assert wanted <= set(tilewise.__all__)
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in wanted:
        assert f"strategies/{name}.md" in navigation
        assert f"{name}(" in (ROOT / "docs" / "strategies" / f"{name}.md").read_text()
    # The checker's own tests go over the conformance table, or name the strategy themselves.
    checked = [words(tree) for tree in parse_tests("**/test_*.py") if "check" in words(tree)]
    assert not {n for n in wanted if not any({n, "STRATEGIES"} & seen for seen in checked)}
