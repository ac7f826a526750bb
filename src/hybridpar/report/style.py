"""The style sheet and the script of the page; both go into it."""

# Eight colours that differ for colour-blind eyes too, in an order in which neighbours contrast.
_LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#4a3aa7", "#e34948", "#e87ba4", "#008300")
_DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#9085e9", "#e66767", "#d55181", "#40a040")
NUM_COLOURS = len(_LIGHT)


def _colours(colours: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))


_BY_COLOUR = "".join(
    f".s{n}{{stroke:var(--c{n})}}.dot.s{n}{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in range(NUM_COLOURS)
)

CSS = f"""
:root{{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#161615;--soft:#5b5a55;
--rule:#e3e2dc;--bad:#b3261e;--badback:#fdeceb;{_colours(_LIGHT)}--c8:#b9b8b1}}
@media (prefers-color-scheme:dark){{:root{{--page:#131312;--card:#1d1d1b;--ink:#f2f1ec;
--soft:#a9a8a0;--rule:#33322f;--bad:#ff8a80;--badback:#3a1d1b;{_colours(_DARK)}--c8:#5d5c57}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:24px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}}
h2{{font-size:17px;margin:36px 0 12px}}
p{{margin:0 0 12px;max-width:75ch}} h1+p{{max-width:none}} .soft{{color:var(--soft)}}
.bad{{background:var(--badback);color:var(--bad);border-radius:8px;padding:10px 14px;margin:14px 0;
overflow-wrap:anywhere;white-space:pre-wrap}}
.grid3{{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr))}}
.card{{background:var(--card);border:1px solid var(--rule);border-radius:10px;margin:0;
padding:14px 16px;min-width:0}}
figcaption{{font-weight:600;font-size:14px;display:flex;flex-wrap:wrap;gap:2px 12px;
margin-bottom:6px}}
.key{{display:flex;flex-wrap:wrap;gap:0 12px;font-weight:400;color:var(--soft);font-size:13px}}
.tiles{{display:grid;gap:14px;margin-top:20px;
grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}}
.tiles div{{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:10px 14px}}
.tiles b{{display:block;font-size:22px;line-height:1.3;font-weight:650}}
.tiles span{{color:var(--soft);font-size:13px}}
svg{{display:block;width:100%;height:auto;touch-action:pan-y}}
svg text{{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}}
svg .grid{{stroke:var(--rule);stroke-width:1}}
svg polyline{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
svg .pale{{stroke:var(--c8);stroke-width:1;opacity:.55}} svg .dot.pale{{fill:var(--c8)}}
svg .cross{{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}}
svg .tip{{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}}
{_BY_COLOUR}.b8{{background:var(--c8)}}
.stack{{display:flex;gap:2px;height:26px;margin:4px 0 12px}}
.stack i{{min-width:2px;border-radius:3px}}
.swatch{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}}
.wide{{overflow-x:auto}} .wide td,.wide code{{white-space:nowrap}}
.wide+p,table+p{{margin:10px 0 0}} table{{border-collapse:collapse;width:100%;font-size:14px}}
th,td{{text-align:left;padding:6px 14px 6px 0;vertical-align:top;
border-bottom:1px solid var(--rule)}}
th{{color:var(--soft);font-weight:500;font-size:13px;white-space:nowrap}}
tr:last-child td{{border-bottom:0}}
.n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
.meter{{display:block;height:6px;border-radius:3px;min-width:2px;margin-top:4px}}
td.bar{{min-width:110px}}
.columns{{display:flex;align-items:stretch;gap:2px;height:170px;overflow-x:auto}}
.columns div{{flex:1 1 0;min-width:26px;max-width:80px;display:flex;flex-direction:column;
justify-content:flex-end;text-align:center;font-size:12px;color:var(--soft)}}
.columns i{{border-radius:4px 4px 0 0}} .columns b{{font-weight:400;padding-top:4px}}
code{{font:13px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace;
overflow-wrap:anywhere}}
footer{{margin-top:40px;color:var(--soft);font-size:13px}}
@media (max-width:520px){{main{{padding:18px 12px 40px}}
.tiles{{gap:10px;grid-template-columns:1fr 1fr}}.card{{padding:12px}}}}
"""

# Shows the values under the pointer. Without it the page is whole all the same.
SCRIPT = """
for (const svg of document.querySelectorAll('svg.curve')) {
  const lines = JSON.parse(svg.dataset.lines), ns = 'http://www.w3.org/2000/svg';
  [...svg.querySelectorAll('polyline')].forEach((drawn, n) => {
    lines[n].colour = drawn.getAttribute('class');
    lines[n].points = drawn.getAttribute('points').split(' ').map(p => p.split(',').map(Number));
  });
  let shown = [];
  const add = (tag, names, attributes) => {
    const e = document.createElementNS(ns, tag);
    e.setAttribute('class', names);
    for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
    shown.push(svg.appendChild(e));
    return e;
  };
  const clear = () => { for (const e of shown) e.remove(); shown = []; };
  const text = (v, unit) => unit === '%' ? (100 * v).toPrecision(3) + ' %'
    : Number(v.toPrecision(4)).toLocaleString('en', {maximumSignificantDigits: 4});
  svg.addEventListener('pointerleave', clear);
  svg.addEventListener('pointermove', event => {
    clear();
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = (event.clientX - box.left) / box.width * view.width;
    lines.forEach((line, n) => {
      let i = 0;
      line.points.forEach((p, k) => {
        if (Math.abs(p[0] - x) < Math.abs(line.points[i][0] - x)) i = k;
      });
      const [px, py] = line.points[i], right = px > view.width / 2;
      if (n === 0) add('line', 'cross', {x1: px, x2: px, y1: 12, y2: view.height - 26});
      add('circle', 'dot ' + line.colour, {cx: px, cy: py, r: 4});
      add('text', 'tip', {x: px + (right ? -8 : 8), y: 22 + 14 * n,
        'text-anchor': right ? 'end' : 'start'}).textContent =
        (lines.length > 1 ? line.name + ' ' : '') + text(line.values[i], line.unit)
        + (n === 0 ? ' at step ' + line.steps[i].toLocaleString('en') : '');
    });
  });
}
"""
