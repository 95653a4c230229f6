"""Style and script of the leaderboard's page."""

STYLE = """
:root { --ink: #1b1f24; --muted: #5c6570; --line: #d9dee4; --paper: #ffffff; --own: #e6f2fa;
  --link: #0060a8; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --muted: #a0a9b4; --line: #3a424c;
  --paper: #14181d; --own: #16303f; --link: #6cb6f5; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 auto; max-width: 76rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.2rem; }
a { color: var(--link); } code { font-size: .9em; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
.sorts td { text-align: right; white-space: nowrap; }
.text td { min-width: 16rem; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; background: var(--paper); position: sticky; left: 0;
  min-width: 10rem; max-width: 17rem; overflow-wrap: anywhere; }
thead th { font-size: .85rem; color: var(--muted); vertical-align: bottom; }
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:hover, thead button:focus-visible { text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
small { display: block; font-size: .75rem; font-weight: 400; color: var(--muted); }
.own > * { background: var(--own); } .own > th { box-shadow: inset 4px 0 var(--link); }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 15px; }
  th, td { padding: .35rem .45rem; }
  tbody th { min-width: 9.5rem; max-width: 9.5rem; font-size: .85rem; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sorts')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent;
  const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  heads.forEach((head, i) => head.firstChild.addEventListener('click', () => {
    const up = head.getAttribute('aria-sort') !== 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const rows = [...body.rows].sort((a, b) => compare(value(a, i), value(b, i)));
    body.append(...(up ? rows : rows.reverse()));
  }));
}
"""
