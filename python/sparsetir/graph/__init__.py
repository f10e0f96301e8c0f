"""Message passing models through `torch.compile(model, backend="sparsetir")`.

`backend` is what torch calls, `regions` finds what becomes one kernel each, `factors` takes out of
sums what their terms share, `expressions` says what torch's operators compute, `programs` writes it
in stage I, `operator` runs it, `orders` keeps edges that are sorted, `prelude` what follows from
the edges alone, `explain` shows all of it. Of the rest `products` and `reuse` run what they can,
`rest` has Inductor compile it. `export` makes a library of a model: `to_relax` translates it, with
`dense` for what is no region and `edges` for what torch does else.
"""

from sparsetir import needs_torch  # noqa: F401
