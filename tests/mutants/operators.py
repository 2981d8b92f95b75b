"""Slips made from the text of a module: operators of mutmut, and four of our own.

These drop a statement, exchange two adjacent statements, and invert or weaken a condition. Changes
without an effect on the program are left out by rule: see the names below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import libcst as cst
from libcst import metadata
from mutmut.mutation.mutators import mutation_operators

_TAKEN = {
    *("operator_number", "operator_name", "operator_augmented_assignment", "operator_if_exp"),
    *("operator_remove_unary_ops", "operator_keywords", "operator_swap_op"),
}
_OPERATORS = [(kind, made) for kind, made in mutation_operators if made.__name__ in _TAKEN]
# Text, types and values that callers pass: no slip in them, nor in what is inside them.
_NO_SLIPS = (
    *(cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert, cst.Param),
    *(cst.SimpleString, cst.FormattedString, cst.ConcatenatedString),
)
# Calls that write text for people, name something for them, prepare a test, or only save time.
_TEXT_CALLS = {
    *("print", "log", "_log", "debug", "info", "warn", "_warn", "warning", "error", "exception"),
    *("print_exception", "print_exc", "set_process_name", "add_argument", "say"),
    *("hit", "set_context", "maybe_corrupt_gradients", "maybe_corrupted"),
    *("sleep", "freeze", "collect", "cast", "TypeVar", "NewType", "simplefilter"),
}
_TEXT_ARGUMENTS = {"strict", "daemon", "flush", "indent", "name", "help", "stacklevel"}
_TEXT_FUNCTIONS = re.compile(
    r"__(repr|str|hash)__|in_words|in_short|describe|description|meaning_of|words$|says$"
)
# Containers: their changes do not depend on that of another one just before.
_CONTAINER_CALLS = {
    "__init__",
    "append",
    "add",
    "update",
    "extend",
    "discard",
    "setdefault",
    "remove",
    "clear",
}
# Orders of the state machine are carried out after its answer, so only the order of two matters.
_ORDERS = {"act", "emit"}
# A longer time or a larger block is no mistake: numbers are changed where they count something.
_MEASURE = re.compile(
    r"(seconds|bytes|timeout|attempts|tries)$|^_?(most|max|least|min)_", re.IGNORECASE
)
# Nor is it one if what is exactly at the end of a time, or at such a number, counts as beyond it.
_LIMIT = re.compile(r"^(now|deadline|due|until|monotonic)$|_seconds$|^_?(MOST|MAX)_")
_STRICT = (cst.LessThan, cst.LessThanEqual, cst.GreaterThan, cst.GreaterThanEqual)
_LARGEST_COUNT = 64
_EXACT_FLOATS = ("0.0", "1.0")


@dataclass(frozen=True)
class Change:
    """A slip as a change of bytes: those from ``begin`` to ``end`` become ``text``.

    ``function``: its qualified name, or that of the outermost function around it; empty outside.
    """

    kind: str
    function: str
    line: int
    begin: int
    end: int
    text: str

    def texts(self, source: str) -> tuple[str, str]:
        """Return lines that are once in the module's text, and the same with the slip."""
        before = source.encode()
        first, last = before.rfind(b"\n", 0, self.begin) + 1, before.find(b"\n", self.end) + 1
        while before.count(before[first:last]) != 1:
            first = before.rfind(b"\n", 0, first - 1) + 1
        changed = before[first : self.begin] + self.text.encode() + before[self.end : last]
        return before[first:last].decode(), changed.decode()


def changes(source: str) -> list[Change]:
    """Return all slips that the operators make of a module's text."""
    finder = _Finder(source)
    metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True).visit(finder)
    return list(dict.fromkeys(finder.found))


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (metadata.ByteSpanPositionProvider,)

    def __init__(self, source: str) -> None:
        super().__init__()
        self.found: list[Change] = []
        self._source = source.encode()
        self._scopes: list[cst.ClassDef | cst.FunctionDef] = []
        self._last: cst.CSTNode | None = None
        self._limits: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        function = next((s for s in self._scopes if isinstance(s, cst.FunctionDef)), None)
        if _cannot_matter(node, function is None):
            return False
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self._scopes.append(node)
        if isinstance(node, cst.FunctionDef):
            self._last = _return_at_the_end(node)
        if function:
            self._add_structural(node)
        if isinstance(node, cst.Comparison) and _has_limit(node):
            self._limits.update(t for t in node.comparisons if isinstance(t.operator, _STRICT))
        code = cst.Module([]).code_for_node
        for kind, operator in _OPERATORS:
            if isinstance(node, kind) and node not in self._limits:
                for changed in operator(node):
                    if self._text(node) == code(node):
                        self._add(operator.__name__[len("operator_") :], node, code(changed))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._scopes and self._scopes[-1] is original_node:
            self._scopes.pop()

    def _add_structural(self, node: cst.CSTNode) -> None:
        match node:
            case cst.IndentedBlock():
                for first, second in pairwise(node.body):
                    if _is_order(first, second, self._text(second)):
                        between = self._source[self._span(first)[1] : self._span(second)[0]]
                        text = self._text(second) + between.decode() + self._text(first)
                        self._add("exchange", first, text, second)
            case cst.SimpleStatementLine() if _has_effect(node) and node is not self._last:
                self._add("drop", node, "pass")
            case cst.If(test=test) | cst.While(test=test) | cst.CompIf(test=test):
                self._add("invert", test, f"(not ({self._text(test)}))")
            case cst.BooleanOperation():
                for side in (node.left, node.right):
                    self._add("weaken", node, f"({self._text(side)})")

    def _add(
        self, kind: str, node: cst.CSTNode, text: str, last: cst.CSTNode | None = None
    ) -> None:
        kinds = [isinstance(scope, cst.FunctionDef) for scope in self._scopes]
        outermost = kinds.index(True) + 1 if True in kinds else 0
        function = ".".join(scope.name.value for scope in self._scopes[:outermost])
        begin, end = self._span(node)[0], self._span(last or node)[1]
        line = self._source.count(b"\n", 0, begin) + 1
        self.found.append(Change(kind, function, line, begin, end, text))

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self.get_metadata(metadata.ByteSpanPositionProvider, node)
        return span.start, span.start + span.length

    def _text(self, node: cst.CSTNode) -> str:
        begin, end = self._span(node)
        return self._source[begin:end].decode()


def _cannot_matter(node: cst.CSTNode, is_outside: bool) -> bool:
    """Whether no slip in a node can change what the program does, but for text and times.
    ``is_outside``: of functions."""
    match node:
        case cst.AnnAssign():
            return is_outside  # a field, whose default callers pass over
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return is_outside and (name.startswith("__") or bool(_MEASURE.search(name)))
        case cst.FunctionDef(name=cst.Name(value=name)):
            return bool(_TEXT_FUNCTIONS.search(name))
        case cst.If(test=cst.Name(value=name) | cst.Comparison(left=cst.Name(value=name))):
            return name in ("TYPE_CHECKING", "__name__")
        case cst.If(test=test) if "failpoints.ACTIVE" in cst.Module([]).code_for_node(test):
            return True  # only in tests
        case cst.Arg(keyword=cst.Name(value=name)):
            return name in _TEXT_ARGUMENTS or bool(_MEASURE.search(name))
        case cst.Integer():
            return node.evaluated_value > _LARGEST_COUNT
        case cst.Float():
            return node.value not in _EXACT_FLOATS
        case cst.IfExp(body=cst.SimpleString() as a) | cst.IfExp(orelse=cst.SimpleString() as a):
            return not a.raw_value  # a part of a text
        case cst.Call():
            return _called(node) in _TEXT_CALLS
    return isinstance(node, (*_NO_SLIPS, cst.Raise))  # its words: that it is raised does matter


def _has_limit(comparison: cst.Comparison) -> bool:
    """Return whether a comparison is with a time, or with a number that only tunes."""
    sides = [comparison.left, *(target.comparator for target in comparison.comparisons)]
    return any(_LIMIT.search(_called(side) or _last_name(side)) for side in sides)


def _last_name(node: cst.CSTNode) -> str:
    """Return the name of a variable or an attribute; empty if it is neither."""
    match node:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
    return ""


def _called(node: cst.CSTNode) -> str:
    """Return the last name of what is called; empty if it is no call of a name."""
    match node:
        case cst.Await(expression=inner) | cst.Expr(value=inner):
            return _called(inner)
        case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
            return name
    return ""


def _has_effect(line: cst.SimpleStatementLine) -> bool:
    match line.body[0]:
        case cst.Expr() as statement:
            return bool(_called(statement)) and _called(statement) not in _TEXT_CALLS
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript())]):
            return True
        case cst.Raise(exc=cst.Call(func=cst.Name(value="AssertionError"))):
            return False
        case cst.Del(target=target):
            return isinstance(target, cst.Subscript)  # the rest is freed a little later
        case cst.Return(value=None | cst.Name(value="None" | "True" | "False")):
            return True
    return isinstance(line.body[0], cst.AugAssign | cst.Raise | cst.Continue | cst.Break)


def _return_at_the_end(function: cst.FunctionDef) -> cst.CSTNode | None:
    """Return a function's last line if it answers what the end does, or what is false as well."""
    match function.body.body[-1]:
        case (
            cst.SimpleStatementLine(body=[cst.Return(value=None | cst.Name(value="None"))]) as line
        ):
            return line
    return None


def _is_order(first: cst.CSTNode, second: cst.CSTNode, text: str) -> bool:
    """Whether it can matter which of two statements is first, and both can be."""
    calls, orders = [], 0
    for line in (first, second):
        match line:
            case cst.SimpleStatementLine(body=[cst.Expr() as statement]) if _has_effect(line):
                calls.append(_called(statement) not in _CONTAINER_CALLS | _ORDERS)
                orders += _called(statement) in _ORDERS
            case cst.SimpleStatementLine(body=[cst.Assign(targets=[target], value=value)]):
                name = target.target.value if isinstance(target.target, cst.Name) else None
                if name and (not _called(value) or re.search(rf"\b{name}\b", text)):
                    return False
                calls.append(False)
            case _:
                return False
    return orders == 2 if orders else any(calls)
