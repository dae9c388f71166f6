"""Private names of Jinja's compiler: 3.1 has all of them."""

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class HookedCodeGenerator(CodeGenerator):
    """Lets the environment print, join and build values: `write`, `join_texts`, `build`."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile:
            self.write("(escape if context.eval_ctx.autoescape else environment.write)(")
        elif frame.eval_ctx.autoescape:
            self.write("escape(")
        else:
            self.write("environment.write(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes what joins values with `~`."""
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """Writes what makes a tuple."""
        built = node.ctx == "load" and _holds_values(node.items)
        self._build(built, super().visit_Tuple, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """Writes what makes a list."""
        self._build(_holds_values(node.items), super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Writes what makes a dict."""
        values = [part for pair in node.items for part in (pair.key, pair.value)]
        self._build(_holds_values(values), super().visit_Dict, node, frame)

    def _build(self, built: bool, visit: Any, node: nodes.Expr, frame: Frame) -> None:
        if not built:
            visit(node, frame)
            return
        self.write("environment.build(")
        visit(node, frame)
        self.write(")")


def _holds_values(items: list[nodes.Expr]) -> bool:
    return not all(isinstance(item, nodes.Const) for item in items)
