"""Private names of PyTorch are used in `intaglio.torch_private` and nowhere else."""

import ast
from collections.abc import Iterable, Iterator

import pytest

from support.project_files import ROOT, syntax_nodes

PACKAGE = ROOT / "src" / "intaglio"
HOME = "torch_private.py"
ALLOWED = {
    "backends/inductor/inductor_model.py": "a backend is written against Inductor's own modules as a whole",
    "backends/inductor/inductor_sizes.py": "evaluates sizes of Inductor's graphs by the printers Inductor has for them",
    "peers/peer_engines.py": "turns an option of Inductor on for the engines that it builds",
    "runtime/quantized_model.py": "overrides three methods of nn.Module that exist for it",
}
ATTRIBUTES = {
    "_apply",
    "_buffers",
    "_cdata",
    "_load_from_state_dict",
    "_load_state_dict_pre_hooks",
    "_modules",
    "_parameters",
    "_save_to_state_dict",
    "_schema",
    "_set_replace_hook",
    "_state_dict_hooks",
}
"""Private attributes of torch's objects, whatever an expression calls them."""


def private_uses(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield every private name of torch that a file imports or reads; names of operators are public."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (f"{node.lineno}: {name}" for name in names if _is_private(name))
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if (node.attr in ATTRIBUTES and not own) or _is_private_of_torch(node):
                yield f"{node.lineno}: {ast.unparse(node)}"


def _is_private_of_torch(node: ast.Attribute) -> bool:
    first: ast.expr = node
    while isinstance(first, ast.Attribute):
        first = first.value
    if not isinstance(first, ast.Name) or first.id != "torch":
        return False
    name = ast.unparse(node)
    return _is_private(name) and not name.startswith("torch.ops.")


def _is_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_private_names_of_torch_have_one_home():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != HOME and name not in ALLOWED:
            found += [f"src/intaglio/{name}:{use}" for use in private_uses(syntax_nodes(path))]
    assert not found, "import these from intaglio.torch_private:\n" + "\n".join(found)


def test_every_listed_exception_is_needed():
    assert all(list(private_uses(syntax_nodes(PACKAGE / name))) for name in ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "torch._C.DisableTorchFunction()",
        "module._buffers[name] = tensor",
        "tensor.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_found(source):
    assert list(private_uses(ast.walk(ast.parse(source))))


@pytest.mark.parametrize("source", ["torch.ops.aten._to_copy.default", "self._buffers", "torch.__version__"])
def test_a_public_name_is_not_reported(source):
    assert not list(private_uses(ast.walk(ast.parse(source))))
