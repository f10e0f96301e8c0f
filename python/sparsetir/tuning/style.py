"""The style of a report's page: light or dark as the reader's system, and fit for print."""

from __future__ import annotations

__all__ = ["STYLE"]

# Colours by Okabe and Ito, which stay apart for the colour-blind; lighter ones on dark.
STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1d2126;--faint:#66707a;
--grid:#dfe3e6;--ours:#56b4e9;--best:#0072b2;--other:#e69f00;--bad:#d55e00}
@media (prefers-color-scheme:dark){:root{--paper:#15181b;--card:#1e2226;--ink:#e6e8ea;
--faint:#98a2ab;--grid:#343a40;--ours:#2f7fb0;--best:#7cc7f2;--other:#f0b429;--bad:#ff8a4c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-size:15px}
main{max-width:1060px;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.35rem;margin:.5rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 .7rem}
section{background:var(--card);border:1px solid var(--grid);border-radius:8px;
padding:1rem 1.2rem;margin:0 0 1rem;break-inside:avoid}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem 2.8rem;margin-bottom:.5rem}
.tile b{display:block;font-size:1.8rem;line-height:1.25;color:var(--best)}
.tile span,.note,dt{color:var(--faint)}
.note{font-size:.87rem;margin:.5rem 0 0}
.trouble{color:var(--bad)}
p{margin:.4rem 0}
code,td{font-variant-numeric:tabular-nums}
code{font-size:.95em}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--faint);font-weight:600;white-space:nowrap}
tr:last-child td{border-bottom:0}
.number{text-align:right;white-space:nowrap}
svg,img{display:block;width:100%;height:auto}
svg image{image-rendering:pixelated}
svg *{stroke-linejoin:round;stroke-linecap:butt}
.picture{background:#fff;border-radius:6px;padding:.4rem}
.picture svg,.picture img{margin:0 auto}
summary{cursor:pointer}
details[open] summary{margin-bottom:.6rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:0}
dd{margin:0;overflow-wrap:anywhere}
""".strip()
