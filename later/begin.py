"""Removes `torch._dynamo.reset()` and `torch.manual_seed(0)` where an entry function of ranks begins with them."""
import ast, pathlib, sys, collections
root = pathlib.Path(sys.argv[1]); apply = len(sys.argv) > 2
files = [p for p in root.rglob("*.py")]
trees = {p: ast.parse(p.read_text()) for p in files}
# names used as first arg of .run( / run_to_the_end( and every other use
as_entry, other = collections.Counter(), collections.Counter()
for p, t in trees.items():
    entry_nodes = set()
    for n in ast.walk(t):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("run",) and n.args and isinstance(n.args[0], ast.Name):
            as_entry[n.args[0].id] += 1; entry_nodes.add(n.args[0])
    for n in ast.walk(t):
        if isinstance(n, ast.Name) and n not in entry_nodes: other[n.id] += 1
        if isinstance(n, ast.Attribute): other[n.attr] += 1
count = collections.Counter()
for p, t in trees.items():
    remove = []
    for f in t.body:
        if not isinstance(f, ast.FunctionDef) or f.name.startswith("test_") or not as_entry[f.name] or other[f.name]: continue
        body = f.body[1:] if isinstance(f.body[0], ast.Expr) and isinstance(f.body[0].value, ast.Constant) else f.body
        for s in body:
            text = ast.unparse(s)
            if text in ("torch._dynamo.reset()", "torch.manual_seed(0)"):
                count[text] += 1; remove.append(s.lineno)
            else: break
    if apply and remove:
        lines = p.read_text().splitlines(keepends=True)
        p.write_text("".join(l for i, l in enumerate(lines, 1) if i not in remove))
print(count, sum(count.values()))
