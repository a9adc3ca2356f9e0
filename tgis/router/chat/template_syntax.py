"""Determines from a template's syntax tree whether it expects message content as a list of parts."""

from collections.abc import Iterator

from jinja2 import nodes

CONTENT = "content"
# Filters that apply only to lists of parts, and filters that return a list for a list.
LIST_FILTERS = {"selectattr", "rejectattr", "map"}
KEEPING_FILTERS = {*LIST_FILTERS, "list", "select", "reject", "reverse", "sort", "default", "d", "unique"}


def takes_content_parts(tree: nodes.Template) -> bool:
    """Return True if the template iterates over the content of messages."""
    names = _content_names(tree)
    if any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return True
    filters = (each for each in tree.find_all(nodes.Filter) if each.name in LIST_FILTERS)
    return any(_is_content(each.node, names) for each in filters)


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the names of variables and macro parameters to which a message's content is assigned."""
    names: set[str] = set()
    while more := {name for name, value in _bindings(tree) if _is_content(value, names)} - names:
        names |= more
    return names


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Yield all names with the expressions bound to them."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name | nodes.NSRef):
            yield _name_of(assignment.target), assignment.node
    parameters = {
        macro.name: [argument.name for argument in macro.args] for macro in tree.find_all(nodes.Macro)
    }
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in parameters:
            yield from zip(parameters[call.node.name], call.args, strict=False)
            yield from ((argument.key, argument.value) for argument in call.kwargs)


def _name_of(target: nodes.Name | nodes.NSRef) -> str:
    return target.name if isinstance(target, nodes.Name) else f"{target.name}.{target.attr}"


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr(node=nodes.Name() as owner) if f"{owner.name}.{node.attr}" in names:
            return True
        case nodes.Getattr():
            return bool(node.attr == CONTENT)
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == CONTENT)
        case nodes.Getitem(arg=nodes.Slice()):
            return _is_content(node.node, names)
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
            return bool(key == CONTENT)
        case nodes.Filter():
            return node.name in KEEPING_FILTERS and _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Or() | nodes.And():
            return _is_content(node.left, names) or _is_content(node.right, names)
        case _:
            return False
