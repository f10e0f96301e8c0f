"""Message passing models through `torch.compile(model, backend="sparsetir")`.

`backend` is torch's entry point, `regions` finds the parts that become one kernel each, `factors`
hoists factors out of sums, `expressions` translates torch's operators to expressions, `programs`
writes them in stage I, `ahead` has other processes compile them, `operator` runs them, `orders`
caches sorted edges, `prelude` hoists work that depends on edges alone, `explain` shows all of it.
Outside regions `copies`, `products` and `reuse` speed up some operators, and `rest` lets Inductor
compile the remainder. `export` makes a library of a model: `to_relax` translates it, with `dense`
for pointwise operators outside regions and `edges` for the handling of edges.
"""

from sparsetir import needs_torch  # noqa: F401
