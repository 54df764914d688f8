"""`GroupedMatMul` in standard operators: each row of a value times the matrix that it chose, of a stack of matrices.

1. Rows are sorted by their choice. A Scan runs over the stack; it hands each matrix to its body without a copy, where
   the rows that chose it, often none, are multiplied with it. So no weight is ever gathered, in a prompt or in
   decoding, and what is computed grows with the rows.
2. A step gives as many rows as the most popular matrix has, so that all steps give the same; a row of zeros stands for
   those that a matrix lacks, and nobody reads it.
3. One row more than chose a matrix is multiplied with it, whichever comes next. ONNX Runtime adds up a single row in
   another order than several; so a token's result does not depend on the tokens beside it, to the last bit.
4. A row that chose none, by a number beyond the stack ("partial"), is sorted behind all others, is multiplied with
   nothing, and becomes zero.
"""

from collections.abc import Mapping

import onnx_ir as ir

from exporters.transformers.experts import GROUPED_DOMAIN

HEADER = '<ir_version: 10, opset_import: ["" : {opset}]>'
SORTED = """
sorted (int64[n] chosen) => (int64[m] order, int64[stack, 1] starts, int64[stack, 1] stops, int64[most] slots,
                             int64[n] places{known})
{{
    nothing = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    first = Constant<value_ints = [0]>()
    second = Constant<value_ints = [1]>()
    stack = Constant<value_ints = [{buckets}]>()
    {limit}
    length = Shape(chosen)
    rows = Squeeze(length)
    columns = Range(nothing, rows, one)
    scaled = Mul({choice}, length)
    keys = Add(scaled, columns)
    ordered, by_choice = TopK<largest = 0>(keys, length)
    order = Concat<axis = 0>(by_choice, first)
    none = ConstantOfShape<value = int64[1] {{0}}>(stack)
    ones = ConstantOfShape<value = int64[1] {{1}}>(length)
    counts = ScatterElements<axis = 0, reduction = "add">(none, {choice}, ones)
    ends = CumSum(counts, nothing)
    begins = Sub(ends, counts)
    {narrow}
    starts = Unsqueeze({own}begins, second)
    one_more = Min({own}counts, one)
    beyond = Add({own}ends, one_more)
    stops = Unsqueeze(beyond, second)
    slots = Slice(columns, first, most, first)
    ranked = ScatterElements<axis = 0>(columns, by_choice, columns)
    begun = Gather(begins, {choice})
    rank = Sub(ranked, begun)
    block = Mul({choice}, most)
    {place}
}}
"""
# What the texts say where every row chose a matrix, and where some chose none ("partial").
EVERY_ROW = {
    "known": "",
    "limit": "",
    "choice": "chosen",
    "own": "",
    "narrow": "most = ReduceMax<keepdims = 1>(counts, first)",
    "place": "places = Add(block, rank)",
    "pick": "y = Gather<axis = 0>(stacked, places)",
}
SOME_ROWS = {
    "known": ", bool[n, 1] known",
    "limit": "limit = Constant<value_int = {stack}>() bucket = Min(chosen, limit)",
    "choice": "bucket",
    "own": "own_",
    "narrow": """matrices = Constant<value_ints = [{stack}]>()
    own_counts = Slice(counts, first, matrices)
    own_begins = Slice(begins, first, matrices)
    own_ends = Slice(ends, first, matrices)
    highest = ReduceMax<keepdims = 1>(own_counts, first)
    most = Max(highest, second)""",
    "place": """behind = Add(block, rank)
    chose = Less(chosen, limit)
    known = Unsqueeze(chose, second)
    places = Where(chose, behind, nothing)""",
    "pick": "picked = Gather<axis = 0>(stacked, places) y = Where(known, picked, nobody)",
}
PRODUCT = """
product ({dtype}[n, {inner}] x, {dtype}[{weight}] matrices, int64[m] order, int64[{stack}, 1] starts,
         int64[{stack}, 1] stops, int64[most] slots, int64[n] places{known}) => ({dtype}[n, {out}] y)
{{
    sorted = Gather<axis = 0>(x, order)
    zero = Constant<value_ints = [1, {out}]>()
    nobody = ConstantOfShape<value = {dtype}[1] {{0}}>(zero)
    steps = Scan<num_scan_inputs = 3, body = step ({dtype}[{matrix}] matrix, int64[1] start, int64[1] stop)
        => ({dtype}[most, {out}] made)
    {{
        mine = Slice(sorted, start, stop)
        multiplied = {multiply}(mine, matrix)
        padded = Concat<axis = 0>(multiplied, nobody)
        count = Sub(stop, start)
        picked = Min(slots, count)
        made = Gather<axis = 0>(padded, picked)
    }}>(matrices, starts, stops)
    flat = Constant<value_ints = [-1, {out}]>()
    stacked = Reshape(steps, flat)
    {pick}
}}
"""
TEXT_DTYPES = {ir.DataType.FLOAT: "float", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def expand_grouped(graph: ir.Graph) -> None:
    """Replace the nodes of `experts.grouped` by standard operators, in place."""
    tables: dict[tuple[int, int], dict[str, ir.Value]] = {}
    for node in [node for node in graph if node.domain == GROUPED_DOMAIN]:
        x, matrices, chosen = (value for value in node.inputs if value is not None)
        prefix = f"{matrices.name}.grouped"
        stack, *sides = matrices.shape.numpy()
        facts = _facts(node, stack, sides)
        if (id(chosen), stack) not in tables:
            outputs = _insert(graph, node, SORTED, facts, {"chosen": chosen}, f"{prefix}.rows")
            tables[id(chosen), stack] = outputs
        y = node.outputs[0]
        operands = {"x": x, "matrices": matrices, **tables[id(chosen), stack]}
        outputs = _insert(graph, node, PRODUCT, facts, operands, prefix)
        outputs["y"].name, outputs["y"].shape, outputs["y"].type = y.name, y.shape, y.type
        y.replace_all_uses_with(outputs["y"])
        graph.remove(node, safe=True)
    graph.opset_imports.pop(GROUPED_DOMAIN, None)


def _facts(node: ir.Node, stack: int, sides: list[int]) -> dict[str, object]:
    """The sizes, dtype and operators of a product's texts."""
    rows, partial = (bool(node.attributes[name].as_int()) for name in ("rows", "partial"))
    inner, out = sides if rows else sides[::-1]
    matrix = ", ".join(map(str, sides))
    dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
    return {
        "dtype": TEXT_DTYPES[dtype or ir.DataType.FLOAT],
        "stack": stack,
        "weight": f"{stack}, {matrix}",
        "matrix": matrix,
        "inner": inner,
        "out": out,
        "multiply": "MatMul" if rows else "Gemm<transB = 1>",
        "buckets": stack + partial,
        **{name: text.format(stack=stack) for name, text in (SOME_ROWS if partial else EVERY_ROW).items()},
    }


def _insert(
    graph: ir.Graph, at: ir.Node, text: str, facts: Mapping[str, object], operands: Mapping[str, ir.Value], prefix: str
) -> dict[str, ir.Value]:
    """Insert the nodes of a text before a node; its outputs by name."""
    part = ir.from_onnx_text(HEADER.format(opset=graph.opset_imports[""]) + text.format(**facts)).graph
    outputs = {value.name: value for value in part.outputs}
    for value in part.inputs:
        value.replace_all_uses_with(operands[value.name])
    for inner in [part, *part.subgraphs()]:
        inner.name = f"{prefix}.{inner.name}"
        for value in {*inner.inputs, *(value for node in inner for value in node.outputs)}:
            value.name = f"{prefix}.{value.name}"
            if value.shape is not None:  # sizes of equal names are equal all over a graph; these are not
                value.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in value.shape])
    nodes = list(part)
    part.outputs.clear()
    part.remove(nodes)
    graph.insert_before(at, nodes)
    return outputs
