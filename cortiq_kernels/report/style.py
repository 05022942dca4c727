"""The style of a run's page: light, and dark where the reader's system is. Text has a contrast of 4.5 or more."""

STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4; --grid: #eaeef2; --line: #0b5cad;
  --band: #0b5cad33; --best: #b3400f; --skip: #a40e26; --good: #1a6b34 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e6edf3; --soft: #9aa5b1; --rule: #363e47; --grid: #242b33; --line: #6cb2f5;
    --band: #6cb2f544; --best: #f2a27e; --skip: #ff8f9c; --good: #7ed491 } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 800px; margin: 0 auto; padding: 24px 20px 60px }
h1 { margin: 0; font-size: 26px } h2 { margin: 32px 0 8px; font-size: 18px }
.state { margin: 4px 0; font-weight: 600; color: var(--soft); overflow-wrap: anywhere }
.state.done { color: var(--good) } .state.failed { color: var(--skip) }
.where { margin: 0; color: var(--soft); overflow-wrap: anywhere }
dl { display: flex; flex-wrap: wrap; gap: 12px 32px; margin: 20px 0 }
dt { color: var(--soft); font-size: 13px } dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums }
figure { margin: 28px 0 } figcaption { font-weight: 600 }
.scroll { overflow-x: auto }
svg { display: block; width: 100%; min-width: 520px; height: auto }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.grid { stroke: var(--grid) } .axis { stroke: var(--soft); fill: none }
.line { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round }
.band { fill: var(--band) } .dot, .bar { fill: var(--line) }
.best { fill: none; stroke: var(--best); stroke-width: 2 } svg .best-text { fill: var(--best); font-weight: 600 }
.skip { stroke: var(--skip); stroke-width: 2 } svg .skip-text { fill: var(--skip) }
.about, .none { margin: 4px 0 0; color: var(--soft); font-size: 13px }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: 4px 20px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere }
th { font-weight: 500; color: var(--soft); min-width: 9em } thead th { font-weight: 600 }
details { margin: 8px 0 } summary { cursor: pointer; color: var(--soft) }
@media print { figure, tr { break-inside: avoid } }
"""
